#!/bin/bash
# Runs inside the tools chroot, once: unpack edk2 from what lies in /build, with Debian's patches and then ours.
#   source.sh ORIG DEBIAN
set -euo pipefail
shopt -s nullglob
cd /build
mkdir edk2
tar --extract --file "$1" --strip-components=1 --directory edk2
tar --extract --file "$2" --directory edk2
cd edk2
while read -r patch _; do
  case $patch in '' | '#'*) continue ;; esac
  patch --strip=1 --force --silent --input "debian/patches/$patch"
done <debian/patches/series
for patch in /build/patches/*.patch; do
  patch --strip=1 --force --silent --fuzz=0 --input "$patch"
done
cp /build/grub.cfg OvmfPkg/AmdSev/Grub/grub.cfg
