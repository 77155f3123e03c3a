#!/bin/bash
# Runs inside the tools chroot, for one platform. /build/edk2 is the one path, because edk2 embeds it in what it builds.
#   build.sh JOBS PLATFORM DEFINE...      firmware: /build/edk2/Build/*/RELEASE_GCC5/FV/OVMF.fd
set -euo pipefail
jobs=$1 platform=$2
shift 2
defines=("${@/#/-D}")
set -- # edksetup.sh would take them for its own
cd /build/edk2
export HOME=/tmp PYTHON3_ENABLE=TRUE
set +u
. ./edksetup.sh
set -u
if [ ! -e /build/tools-made ]; then
  make --silent "--jobs=$jobs" --directory=BaseTools ARCH=X64
  touch /build/tools-made
fi
build -q -n "$jobs" -a X64 -t GCC5 -b RELEASE -p "$platform" "${defines[@]}"
