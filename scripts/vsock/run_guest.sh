#!/usr/bin/env bash
# Runs tests/vsock over real AF_VSOCK, in the first guest that works here: User Mode Linux, which boots in two seconds and
# needs neither KVM nor a device of the host, else Debian's kernel in QEMU, emulated and so with a small model. Installs what
# it needs where that is possible. VSOCK_TEST_WITH=uml or qemu takes that one. Exit status 77: no guest works here; 0 instead
# where VSOCK_TEST_MAY_SKIP=1 says that this may be.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/vsock/qemu_guest.sh
uml_packages=(user-mode-linux busybox-static)
limit_s=${VSOCK_TEST_LIMIT_S:-2400}
why=

skip() {
  printf '\n%s\n%s\n\n' "SKIPPED: no test ran over real AF_VSOCK: $1" \
    "The same tests ran over unix sockets and an emulated hybrid vsock only." >&2
  [[ ${VSOCK_TEST_MAY_SKIP:-} == 1 ]] && exit 0
  exit 77
}

# install PACKAGE...: or say in $why what stands in the way.
install() {
  command -v apt-get >/dev/null || { why="this system has no apt-get to install $*"; return 1; }
  ((EUID == 0)) || { why="installing $* takes root"; return 1; }
  echo "Installing $*"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } \
    >/dev/null 2>&1 || { why="$* cannot be installed"; return 1; }
}

# What a guest that died said of it.
said() {
  { grep -hm1 -E 'failed, errno|Kernel panic|INITRD: ' "$work/log" "$work/errors" || tail -qn 1 "$work/errors" "$work/log"; } |
    tr -d '\r' | head -n 1
}

# boot NAME SECONDS COMMAND...: shows what the guest says; 1 where it ends, or says nothing for so long, before the first line
# of its init.
boot() {
  local name=$1 deadline=$((SECONDS + $2))
  shift 2
  : >"$work/log"
  # In a shell of its own, which takes the message of how the guest died, and ends it when it is ended.
  (timeout "$limit_s" "$@" & trap "kill $!" TERM; wait $! || true) </dev/null >"$work/log" 2>"$work/errors" &
  guest=$!
  while ! grep -q '^GUEST: Linux' "$work/log"; do
    if ! kill -0 "$guest" 2>/dev/null || ((SECONDS > deadline)); then
      kill "$guest" 2>/dev/null || true
      wait "$guest" || true
      guest=
      why="$name ended before its first program said a word: $(said)"
      return 1
    fi
    sleep 0.5
  done
  tail -n +1 -f --pid="$guest" "$work/log" | sed -u 's,\r,,'
  wait "$guest" || true
  guest=
}

with_uml() {
  if ! command -v linux.uml >/dev/null || ! ls /usr/lib/uml/modules/*/kernel/net/vmw_vsock/vsock_loopback.ko >/dev/null 2>&1 ||
    ! command -v busybox >/dev/null; then
    install "${uml_packages[@]}" || return 1
  fi
  mkdir -p "$work/memory"
  echo "Booting User Mode Linux with vsock_loopback"
  TMPDIR=$work/memory HOME=$work boot "User Mode Linux" 60 linux.uml mem=2048M root=/dev/root rootfstype=hostfs rootflags=/ ro \
    init="$work/init" con=null con0=null,fd:1 ssl=null quiet checkout="$PWD" data="$data" model="$real_model" slow=1
}

with_qemu() {
  qemu_guest_ready || return 1
  .venv/bin/python -m tests.small_llama "$work/data/attested-inference/models"
  echo "Booting Debian's kernel in QEMU, emulated, with vsock_loopback and the model small-llama"
  boot QEMU 300 "${qemu_guest[@]}" -append "$qemu_guest_options init=$work/init checkout=$PWD data=$work/data model=small-llama slow=10"
}

[[ $(uname -s)-$(uname -m) == Linux-x86_64 ]] || skip "the guests are for Linux on x86-64"
real_model=smollm2-135m-instruct
data=${XDG_DATA_HOME:-$HOME/.local/share}
work=$(mktemp -d)
guest=
trap '[[ ! $guest ]] || kill "$guest" 2>/dev/null || true; rm -rf "$work"' EXIT
cp scripts/vsock/guest_init.sh "$work/init"
chmod 755 "$work" "$work/init"
# The guest cannot write where bytecode is kept, and each of its programs would compile everything anew.
.venv/bin/python -m compileall -q appliance client_sdk tests || true
reasons=() ran=
for kind in ${VSOCK_TEST_WITH:-uml qemu}; do
  if "with_$kind"; then ran=$kind; break; fi
  echo "No guest of this kind: $why"
  reasons+=("$why")
done
[[ $ran ]] || skip "$(IFS=';'; echo "${reasons[*]}")"
if ! grep -q '^GUEST-RC=0' "$work/log"; then
  cat "$work/errors" >&2
  echo "The tests over real AF_VSOCK failed (guest: $ran)" >&2
  exit 1
fi
echo "The tests over real AF_VSOCK passed (guest: $ran)"
