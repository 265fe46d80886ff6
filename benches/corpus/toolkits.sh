# One toolkit for all: a few tools in /opt/toolkit that run on any Debian base.
case "$TREE" in
toolkit-tools)
    for package in ripgrep jq libjq1 libonig5 fd-find; do unpack_package "$package" "$OUT/unpacked"; done
    mkdir -p "$OUT/opt/toolkit/bin" "$OUT/opt/toolkit/lib" "$OUT/opt/toolkit/libexec"
    cp -a "$OUT"/unpacked/usr/bin/rg "$OUT/opt/toolkit/bin/rg"
    cp -a "$OUT"/unpacked/usr/lib/cargo/bin/fd "$OUT/opt/toolkit/bin/fd" 2>/dev/null || cp -aL "$OUT"/unpacked/usr/bin/fdfind "$OUT/opt/toolkit/bin/fd"
    cp -a "$OUT"/unpacked/usr/bin/jq "$OUT/opt/toolkit/libexec/jq"
    cp -a "$OUT"/unpacked/usr/lib/x86_64-linux-gnu/lib*.so* "$OUT/opt/toolkit/lib/"
    printf '#!/bin/sh\nLD_LIBRARY_PATH=/opt/toolkit/lib exec /opt/toolkit/libexec/jq "$@"\n' >"$OUT/opt/toolkit/bin/jq"
    chmod 755 "$OUT/opt/toolkit/bin/jq"
    rm -rf "$OUT/unpacked"
    pip install --quiet --root-user-action=ignore --no-compile --only-binary=:all: --target "$OUT/unpacked" uv==0.5.14
    cp -a "$OUT"/unpacked/bin/uv "$OUT/opt/toolkit/bin/uv"
    rm -rf "$OUT/unpacked"
    clamp_times
    ;;
esac
