# Related images: the small base with other Debian packages installed by its own dpkg.
packages=${TREE#image-}
base="$WORK/trees/base-small"
debs="$downloads/debs-$packages"
mkdir -p "$debs"
update_private_apt
# What is missing is worked out against the base's own list of installed packages.
if [ -z "$(ls "$debs")" ]; then
    private_apt apt-get -o Dir::State::status="$base/var/lib/dpkg/status" -o Dir::Cache::archives="$debs" -o APT::Install-Recommends=false \
        -o Debug::NoLocking=1 install --download-only --yes "$packages" >/dev/null
    rm -rf "$debs/partial" "$debs/lock"
fi
rmdir "$OUT"
cp -a "$base" "$OUT"
mkdir -p "$OUT/debs"
cp "$debs"/*.deb "$OUT/debs/"
# No services, no questions, and the base's path filters.
printf '#!/bin/sh\nexit 101\n' >"$OUT/usr/sbin/policy-rc.d"
chmod 755 "$OUT/usr/sbin/policy-rc.d"
{
    echo force-unsafe-io
    printf '%s\n' "${slim[@]#--dpkgopt=}"
} >"$OUT/etc/dpkg/dpkg.cfg.d/corpus"
# Nothing of the caller's environment: a TMPDIR of the host is no folder in there.
chroot "$OUT" env -i SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH" LC_ALL=C.UTF-8 TZ=UTC HOME=/root DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin sh -c 'dpkg --install /debs/*.deb' >"$OUT.log" 2>&1 ||
    { tail -n 20 "$OUT.log" >&2; exit 1; }
rm -rf "$OUT/debs" "$OUT/usr/sbin/policy-rc.d" "$OUT/etc/dpkg/dpkg.cfg.d/corpus" "$OUT"/var/log/* "$OUT"/var/cache/ldconfig/* "$OUT"/tmp/* "$OUT"/run/*
clamp_times
