# Shared by the corpus scripts. Sourced, with WORK (the work folder) and OUT (the tree to make) set.
#
# Trees are a function of the package archives' contents alone: every time stamp later than
# SOURCE_DATE_EPOCH is set to it, and nothing that records the build (logs, caches) stays.
set -euo pipefail
export SOURCE_DATE_EPOCH=1735689600   # 2025-01-01, UTC
export LC_ALL=C.UTF-8 TZ=UTC
umask 022

# Debian release of every base; its default mirrors are those of mmdebstrap.
readonly suite=bookworm
readonly downloads="$WORK/downloads"
mkdir -p "$downloads"

# Like an image for containers: no manual pages, translations or documents except licences.
readonly slim=(
    --dpkgopt='path-exclude=/usr/share/man/*'
    --dpkgopt='path-exclude=/usr/share/locale/*'
    --dpkgopt='path-exclude=/usr/share/info/*'
    --dpkgopt='path-exclude=/usr/share/doc/*'
    --dpkgopt='path-include=/usr/share/doc/*/copyright'
)

# make_base PACKAGE... : a Debian minbase with these packages, at $OUT.
make_base() {
    local include
    include=$(IFS=,; echo "$*")
    # Some packages (the JDK) fail to install where there is no folder for manual pages.
    mmdebstrap --mode=root --variant=minbase "${slim[@]}" --aptopt='Acquire::Retries "3"' \
        --essential-hook='mkdir -p "$1/usr/share/man/man1"' --include="$include" "$suite" "$OUT" >"$OUT.log" 2>&1 || { tail -n 20 "$OUT.log" >&2; exit 1; }
    rm -rf "$OUT"/var/cache/apt "$OUT"/var/lib/apt/lists "$OUT"/var/log/* "$OUT"/var/cache/debconf/*-old
    rm -rf "$OUT"/var/cache/ldconfig "$OUT"/tmp/* "$OUT"/run/*
    mkdir -p "$OUT"/workspace
    clamp_times
}

# clamp_times : what was made or touched today gets the fixed time.
clamp_times() {
    find "$OUT" -newermt "@$SOURCE_DATE_EPOCH" -print0 | xargs -0r touch -h -d "@$SOURCE_DATE_EPOCH"
}

# Runs apt with a private state that knows $suite's binary and source packages.
private_apt() {
    local state="$WORK/apt"
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$state/parts"
    # The releases of mmdebstrap's bases: a package of an older one may need exactly the library that the base has newer.
    local signed='[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]' mirror=http://deb.debian.org wanted
    wanted="deb $signed $mirror/debian $suite main
deb-src $signed $mirror/debian $suite main
deb $signed $mirror/debian $suite-updates main
deb $signed $mirror/debian-security $suite-security main"
    if [ "$(cat "$state/sources.list" 2>/dev/null)" != "$wanted" ]; then
        echo "$wanted" >"$state/sources.list"
        : >"$state/status"
        rm -rf "$state/lists"
        mkdir -p "$state/lists/partial"
    fi
    "$1" -qq -o Dir::Etc::SourceList="$state/sources.list" -o Dir::Etc::SourceParts="$state/parts" \
        -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts="$state/parts" \
        -o Dir::State="$state" -o Dir::State::status="$state/status" -o Dir::Cache="$state/cache" \
        -o APT::Sandbox::User=root -o Acquire::Retries=3 "${@:2}"
}

update_private_apt() {
    [ -n "$(find "$WORK/apt/lists" -maxdepth 1 -name '*_Sources*' -mmin -1440 2>/dev/null)" ] || private_apt apt-get update
}

# unpack_source PACKAGE DIR : the upstream part of a Debian source package, unpacked to DIR.
unpack_source() {
    update_private_apt
    (cd "$downloads" && private_apt apt-get source --download-only "$1" >/dev/null)
    local tarball
    tarball=$(find "$downloads" -name "$1_*.orig.tar.*" ! -name '*.asc' | sort | tail -n 1)
    mkdir -p "$2"
    tar -xf "$tarball" -C "$2" --strip-components=1 --no-same-owner
}

# unpack_package PACKAGE DIR : the files of a Debian binary package, unpacked to DIR.
unpack_package() {
    update_private_apt
    (cd "$downloads" && private_apt apt-get download "$1" >/dev/null)
    mkdir -p "$2"
    dpkg-deb -x "$(find "$downloads" -name "$1_*.deb" | sort | tail -n 1)" "$2"
}

# run_script TEXT : puts the workload's command at /workspace/run.sh
write_run() {
    mkdir -p "$OUT/workspace"
    { echo '#!/bin/sh'; echo 'set -eu'; echo 'export HOME=/tmp LC_ALL=C.UTF-8'; cat; } >"$OUT/workspace/run.sh"
    chmod 755 "$OUT/workspace/run.sh"
}
