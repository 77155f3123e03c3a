#!/usr/bin/env bash
# Installs what building (build), comparing (check) or booting (test) the image needs of the machine, where something is
# missing and it can.
set -euo pipefail
declare -A packages=(
  [mmdebstrap]=mmdebstrap [dpkg-deb]=dpkg [unshare]=util-linux [git]=git [tar]=tar
)
if [[ ${1:-} == check ]]; then
  packages+=([diffoscope]=diffoscope-minimal)
fi
if [[ ${1:-} == test ]]; then
  packages+=([qemu-system-x86_64]=qemu-system-x86 [swtpm]=swtpm)
fi
missing=()
for program in "${!packages[@]}"; do
  command -v "$program" >/dev/null || missing+=("${packages[$program]}")
done
[[ -f /usr/share/keyrings/debian-archive-keyring.gpg ]] || missing+=(debian-archive-keyring)
if [[ ${1:-} == test ]]; then
  [[ -f /usr/share/OVMF/OVMF_CODE_4M.fd ]] || missing+=(ovmf)
  pkg-config --exists tss2-esys 2>/dev/null || missing+=(libtss2-dev pkg-config)
fi
((${#missing[@]})) || exit 0
if ! command -v apt-get >/dev/null || ((EUID != 0)); then
  echo "The image needs: ${missing[*]}. Install them as root, or run this as root on Debian." >&2
  exit 1
fi
echo "Installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
