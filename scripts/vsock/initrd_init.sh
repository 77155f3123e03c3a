#!/bin/busybox sh
# First program in QEMU: what is needed to reach the host's root, and to speak vsock; then guest_init.sh there.
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mkdir -p /proc
/bin/busybox mount -t proc proc /proc
# Which of them needs which differs between kernels: go through the list until nothing is left, a few times at most.
load() {
  left=
  for module; do
    /bin/busybox insmod "/modules/$module.ko" 2>/dev/null || left="$left $module"
  done
}
left=$(/bin/busybox cat /modules/list)
for round in 1 2 3 4; do
  load $left
done
[ "$left" ] && echo "INITRD: cannot load$left"
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,cache=loose,msize=524288,ro root /root ||
  { echo "INITRD: the host's root cannot be mounted"; /bin/busybox poweroff -f; }
init=$(/bin/busybox sed -n 's/.*\binit=\([^ ]*\).*/\1/p' /proc/cmdline)
/bin/busybox umount /proc
exec /bin/busybox switch_root /root "$init"
