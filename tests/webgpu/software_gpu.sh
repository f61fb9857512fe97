#!/bin/sh
# Puts a software GPU (SwiftShader: Vulkan on the CPU) into the folder DIR and says how to use it: DIR/environment, to be
# sourced. Debian builds it into chromium-common, of which nothing but three files is taken; nothing is installed.
set -eu

die() { echo "software_gpu.sh: $1" >&2; exit 1; }

[ $# -eq 1 ] || die "usage: software_gpu.sh DIR"
mkdir -p "$1"
dir=$(cd "$1" && pwd)
package=chromium-common
source=${SWIFTSHADER_DIR:-/usr/lib/chromium} # a folder that holds the three files already

if [ ! -f "$source/libvk_swiftshader.so" ]; then
    for tool in apt-get dpkg-deb; do
        command -v $tool >/dev/null || die "there is no $tool here, so $package cannot be fetched: set SWIFTSHADER_DIR to a
folder with libvk_swiftshader.so, vk_swiftshader_icd.json and libvulkan.so.1 (Chromium and Chrome come with them)"
    done
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    chmod 755 "$work" # apt downloads as a user of its own
    fetch() { (cd "$work" && apt-get -qq -o APT::Sandbox::User=root download $package) 2>"$work/said"; }
    if ! fetch; then
        # no or old lists of packages: only root may renew them
        [ "$(id -u)" -eq 0 ] || die "apt-get knows no $package ($(tail -n 1 "$work/said")): run apt-get update as root once"
        apt-get -qq update >"$work/update" 2>&1 || die "apt-get update failed: $(tail -n 1 "$work/update")"
        fetch || die "apt-get download $package failed: $(tail -n 1 "$work/said")"
    fi
    dpkg-deb --extract "$work"/$package*.deb "$work/files"
    source=$work/files/usr/lib/chromium
fi

cp "$source/libvk_swiftshader.so" "$source/libvulkan.so.1" "$dir/" || die "$source lacks a file"
sed "s#\"\./#\"$dir/#" "$source/vk_swiftshader_icd.json" >"$dir/icd.json"
mkdir -p -m 700 "$dir/run"
cat >"$dir/environment" <<EOF
export VK_DRIVER_FILES='$dir/icd.json'
export XDG_RUNTIME_DIR='$dir/run'
export LD_LIBRARY_PATH='$dir'\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
EOF
