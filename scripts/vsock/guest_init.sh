#!/bin/sh
# The first and only program of the guest: real AF_VSOCK over loopback, a few temporary file systems, one command, the end.
# The root is the host's own, read only, so the checkout and its virtual environment are where they are on the host.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/tmp
grep -q ' /dev devtmpfs ' /proc/mounts || mount -t devtmpfs dev /dev
echo "GUEST: Linux $(uname -r)"
modules=/usr/lib/uml/modules/$(uname -r)/kernel/net/vmw_vsock
if [ ! -d /sys/module/vsock_loopback ]; then
  for module in vsock vmw_vsock_virtio_transport_common vsock_loopback; do
    busybox insmod "$modules/$module.ko" || echo "GUEST: cannot load $module"
  done
fi
busybox ip link set lo up

argument() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
cd "$(argument checkout)" || busybox poweroff -f
slow=$(argument slow) # how many times slower than a processor this machine may be; 1 unless it is emulated
env -i PATH="$PATH" LANG=C.UTF-8 HOME=/run TMPDIR=/run PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/run/hypothesis \
  VSOCK_TEST_GUEST=1 \
  XDG_DATA_HOME="$(argument data)" VSOCK_TEST_MODEL="$(argument model)" TEST_SLOW="$slow" \
  .venv/bin/python -m pytest -p no:cacheprovider --basetemp=/run/tests --color=no --durations=8 -v --timeout=$((300 * slow)) tests/vsock
echo "GUEST-RC=$?"
busybox poweroff -f
