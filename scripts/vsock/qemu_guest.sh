# Sourced by run_guest.sh: Debian's own kernel under QEMU (TCG), with the host's root as its own, read only (9p).
# The kernel is unpacked from its package into the user's cache; nothing of it is installed.
qemu_packages=(qemu-system-x86 busybox-static)
# One that a kernel does not have as a module is built in, or not needed.
qemu_modules=(virtio virtio_ring virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci netfs fscache 9pnet 9pnet_virtio 9p
  vsock vmw_vsock_virtio_transport_common vsock_loopback)

# Sets qemu_guest (a command) and qemu_guest_options (of its kernel); 1, with the reason in $why, where there is no such guest.
qemu_guest_ready() {
  local kernel
  if ! command -v qemu-system-x86_64 >/dev/null || ! command -v busybox >/dev/null; then
    install "${qemu_packages[@]}" || return 1
  fi
  qemu_kernel || return 1
  qemu_initrd "$kernel" || return 1
  qemu_guest=(qemu-system-x86_64 -M "q35,accel=tcg" -cpu max -smp 2 -m 2048 -nodefaults -nic none -display none -no-reboot
    -serial stdio -kernel "$kernel/vmlinuz" -initrd "$work/initrd"
    -fsdev "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"
    -device "virtio-9p-pci,fsdev=root,mount_tag=root")
  qemu_guest_options="console=ttyS0 quiet panic=-1 no_timer_check mitigations=off nokaslr"
}

# Sets $kernel: a folder with vmlinuz and the modules, from the cache or fetched now.
qemu_kernel() {
  local package version unpacked cache=${XDG_CACHE_HOME:-$HOME/.cache}/attested-inference-tests
  command -v apt-get >/dev/null || { why="this system has no apt-get to fetch Debian's kernel"; return 1; }
  package=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[0-9][^ ]*\)$/\1/p' | head -n 1)
  if [[ ! $package ]] && ((EUID == 0)); then
    apt-get update -qq >/dev/null 2>&1 || true
    package=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[0-9][^ ]*\)$/\1/p' | head -n 1)
  fi
  [[ $package ]] || { why="no package linux-image-amd64 is known here (Debian's kernel)"; return 1; }
  version=$(apt-cache show "$package" | sed -n 's/^Version: //p' | head -n 1)
  kernel=$cache/$package-$version
  [[ -e $kernel/vmlinuz ]] && return 0
  echo "Fetching $package (70 MB), to boot it, not to install it"
  mkdir -p "$cache"
  unpacked=$(mktemp -d -p "$cache" .kernel-XXXXXX)
  if ! (cd "$unpacked" && { apt-get download -qq "$package" || { apt-get update -qq && apt-get download -qq "$package"; }; } \
    >/dev/null 2>&1 && dpkg-deb --fsys-tarfile ./*.deb | qemu_unpack); then
    rm -rf "$unpacked"
    why="$package cannot be fetched"
    return 1
  fi
  rm -f "$unpacked"/*.deb
  chmod 755 "$unpacked"
  mv -T "$unpacked" "$kernel" 2>/dev/null || rm -rf "$unpacked" # another run was as quick
}

# Keeps of a package's files (a tar archive on standard input) the kernel and the modules that are wanted, in one folder.
qemu_unpack() {
  # tar complains of modules that this kernel has built in; what has to be there is looked for instead.
  tar -x --wildcards --no-anchored --transform 's,.*/,,' 'boot/vmlinuz-*' $(printf '%s.ko* ' "${qemu_modules[@]}") 2>/dev/null || true
  mv vmlinuz-* vmlinuz && ls 9p.ko* vsock_loopback.ko* >/dev/null
}

# An initrd that loads the modules and goes on in the host's root: $work/initrd.
qemu_initrd() {
  local folder=$work/initrd-files module
  mkdir -p "$folder"/{bin,dev,root,modules}
  cp "$(command -v busybox)" "$folder/bin/busybox"
  cp scripts/vsock/initrd_init.sh "$folder/init"
  chmod 755 "$folder/init"
  for module in "${qemu_modules[@]}"; do
    if [[ -e $1/$module.ko ]]; then
      cp "$1/$module.ko" "$folder/modules/"
    elif [[ -e $1/$module.ko.xz ]]; then
      xz -dc "$1/$module.ko.xz" >"$folder/modules/$module.ko"
    else
      continue
    fi
    echo "$module" >>"$folder/modules/list"
  done
  (cd "$folder" && find . | busybox cpio -o -H newc 2>/dev/null) >"$work/initrd"
}
