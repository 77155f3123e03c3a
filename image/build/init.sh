#!/bin/busybox sh
# /init of the initrd: load modules, open both disks with dm-verity, hand over. Each end is one line on the console.
set -f
PATH=/bin
export PATH

say() { echo "appliance: $*" >/dev/console; }
stop() {
  say "stopped: $*"
  busybox sync
  busybox sleep 1
  busybox poweroff -f
  while :; do busybox sleep 60; done # whatever the machine makes of it, nothing goes on here
}

busybox mkdir -p /proc /sys /dev /run /root
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs -o mode=0755,nosuid devtmpfs /dev
say "initrd after $(busybox cut -d ' ' -f 1 /proc/uptime) s"

while read -r module; do
  busybox insmod "/modules/$module.ko" 2>/dev/null # hardware that is absent has no use for its module
done </modules/order

root_hash= root_blocks= model_hash= model_blocks=
take() { # NAME VALUE ALLOWED-CHARACTERS: once, and of these characters alone
  eval "[ -z \"\$$1\" ]" || stop "the command line has appliance.$1 twice"
  case $2 in '' | *[!$3]*) stop "the command line has a bad appliance.$1" ;; esac
  eval "$1=\$2"
}
for option in $(busybox cat /proc/cmdline); do
  case $option in
  appliance.root_hash=*) take root_hash "${option#*=}" 0-9a-f ;;
  appliance.root_blocks=*) take root_blocks "${option#*=}" 0-9 ;;
  appliance.model_hash=*) take model_hash "${option#*=}" 0-9a-f ;;
  appliance.model_blocks=*) take model_blocks "${option#*=}" 0-9 ;;
  esac
done
[ ${#root_hash} = 64 ] && [ -n "$root_blocks" ] || stop "the command line names no root disk"
[ ${#model_hash} = 64 ] && [ -n "$model_blocks" ] || stop "the command line names no model disk"

find_disk() { # UUID of an erofs: prints the first disk that has it
  for name in $(busybox ls /sys/block); do
    [ -b "/dev/$name" ] || continue
    found=$(busybox dd if="/dev/$name" bs=8 skip=134 count=2 2>/dev/null | busybox hexdump -v -e '1/1 "%02x"')
    if [ "$found" = "$1" ]; then
      echo "$name"
      return
    fi
  done
}
open_disk() { # NAME UUID HASH BLOCKS WHAT-ON-CORRUPTION
  tries=0
  while device=$(find_disk "$2") && [ -z "$device" ]; do
    tries=$((tries + 1))
    [ $tries -le 20 ] || stop "no disk is the $1 disk"
    busybox sleep 0.25
  done
  sectors=$(busybox cat "/sys/block/$device/size")
  level=$4 tree=0
  while :; do
    level=$(((level + 127) / 128)) tree=$((tree + level))
    [ $level -gt 1 ] || break
  done
  whole=$((($4 + tree) * 8))
  [ "$sectors" -ge $whole ] || stop "the $1 disk is truncated: $sectors sectors of $whole"
  table="0 $(($4 * 8)) verity 1 /dev/$device /dev/$device 4096 4096 $4 $4 sha256 $3 -${5:+ $5}"
  dmsetup create "$1" --readonly --noudevsync --noudevrules --table "$table" 2>/dev/console ||
    stop "the $1 disk does not open with its hash"
  busybox mkdir -p /dev/mapper # there is no udev to do it
  busybox ln -sf "/dev/dm-$(dmsetup info -c --noheadings -o minor "$1")" "/dev/mapper/$1"
}
# Read whole before anything of it runs: a changed byte is then one line. One changed later ends the machine at once.
open_disk root @ROOT_UUID@ "$root_hash" "$root_blocks" ""
busybox dd if=/dev/mapper/root of=/dev/null bs=1M 2>/dev/null || stop "the root disk is corrupt"
dmsetup remove --noudevsync --noudevrules root || stop "the root disk cannot be opened again"
open_disk root @ROOT_UUID@ "$root_hash" "$root_blocks" "1 panic_on_corruption"
open_disk model @MODEL_UUID@ "$model_hash" "$model_blocks" ""
busybox mount -t erofs -o ro,nodev,nosuid /dev/mapper/root /root || stop "the root disk cannot be mounted: corrupt"
busybox mount -t erofs -o ro,nodev,nosuid,noexec /dev/mapper/model /root/srv/models ||
  stop "the model disk cannot be mounted: corrupt"

for folder in proc sys dev; do busybox mount -o move "/$folder" "/root/$folder"; done
exec busybox switch_root /root /usr/bin/python3.13 -I -m image.init
