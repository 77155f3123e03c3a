#!/usr/bin/env bash
# Runs tests/vsock over real AF_VSOCK: in a User Mode Linux guest, which boots in two seconds and needs neither KVM nor a
# device of the host. Installs what it needs where that is possible. Exit status 77: it is not possible here; 0 instead
# where VSOCK_TEST_MAY_SKIP=1 says that this may be.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
packages=(user-mode-linux kmod iproute2 busybox-static)

skip() {
  printf '\n%s\n%s\n\n' "SKIPPED: no test ran over real AF_VSOCK: $1" \
    "The same tests ran over unix sockets and an emulated hybrid vsock only." >&2
  [[ ${VSOCK_TEST_MAY_SKIP:-} == 1 ]] && exit 0
  exit 77
}

[[ $(uname -s)-$(uname -m) == Linux-x86_64 ]] || skip "User Mode Linux is for Linux on x86-64"
if ! command -v linux.uml >/dev/null || ! ls /usr/lib/uml/modules/*/kernel/net/vmw_vsock/vsock_loopback.ko >/dev/null 2>&1; then
  command -v apt-get >/dev/null || skip "this system has no apt-get to install ${packages[*]}"
  ((EUID == 0)) || skip "installing ${packages[*]} takes root"
  echo "Installing ${packages[*]} (41 MB)"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${packages[@]}"; } >/dev/null ||
    skip "${packages[*]} cannot be installed"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/memory"
cp scripts/vsock/guest_init.sh "$work/init"
chmod 755 "$work" "$work/init"
data=${XDG_DATA_HOME:-$HOME/.local/share}
echo "Booting a guest with vsock_loopback"
TMPDIR=$work/memory HOME=$work timeout "${VSOCK_TEST_LIMIT_S:-600}" linux.uml mem=2048M root=/dev/root rootfstype=hostfs \
  rootflags=/ ro init="$work/init" con=null con0=null,fd:1 ssl=null quiet checkout="$PWD" data="$data" \
  </dev/null 2>"$work/errors" | tee "$work/log" || true
if ! grep -q '^GUEST-RC=0' "$work/log"; then
  cat "$work/errors" >&2
  echo "The tests over real AF_VSOCK failed" >&2
  exit 1
fi
