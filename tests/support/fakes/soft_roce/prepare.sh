#!/usr/bin/env bash
# prepare.sh [CACHE]: what a virtual machine with soft-RoCE devices needs, in CACHE (else
# ~/.cache/adaptra-soft-roce). Installs packages of Debian, so it has to be root; half a minute, once.
# Its last line is the folder that holds `kernel` and `initrd`. Several may run at once.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
cache=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/adaptra-soft-roce}
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9

packages=(qemu-system-x86 busybox-static kmod cpio iproute2 util-linux
  rdma-core ibverbs-providers ibverbs-utils libibverbs-dev python3-pyverbs)
for package in "${packages[@]}"; do
  if ! dpkg -s "$package" 2>/dev/null | grep -q '^Status: install ok installed'; then
    export DEBIAN_FRONTEND=noninteractive
    wait=(-o DPkg::Lock::Timeout=300)
    apt-get "${wait[@]}" update -qq >&2
    apt-get "${wait[@]}" install -y -qq --no-install-recommends "${packages[@]}" >&2
    break
  fi
done

# Another kernel or initrd for another script.
made=$cache/$(cat "$here/prepare.sh" "$here/init.sh" | sha256sum | cut -c1-16)
if [ ! -d "$made" ]; then
  rm -rf "$cache"/making.* # of runs that were killed
  work=$(mktemp -d "$cache/making.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  cd "$work"
  kernel=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ { print $2; exit }')
  version=${kernel#linux-image-}
  apt-get download -qq "$kernel" >&2
  dpkg -x "$kernel"_*.deb unpacked
  depmod -b unpacked "$version"
  mkdir done
  # A kernel that is not compressed starts sooner: the emulated processor is slow.
  python3 - "unpacked/boot/vmlinuz-$version" done/kernel <<'PY'
import lzma
import sys

data = open(sys.argv[1], "rb").read()
with open(sys.argv[2], "wb") as out:
    out.write(lzma.LZMADecompressor().decompress(data[data.index(b"\xfd7zXZ\x00"):]))
PY
  mkdir -p root/{bin,modules,proc,sys,dev,host,top,root}
  cp /bin/busybox root/bin/
  for tool in sh mount insmod mkdir cat echo sleep poweroff chroot ip ln; do ln -s busybox "root/bin/$tool"; done
  for module in virtio_pci virtio_rng virtio_console 9p 9pnet_virtio overlay veth sch_netem \
    crc32_generic crc32_pclmul ib_uverbs rdma_ucm rdma_rxe; do
    modprobe -d unpacked -S "$version" --show-depends "$module" 2>/dev/null |
      awk '$1 == "insmod" { print $2 }' || true
  done | awk '!seen[$0]++' | while read -r file; do
    cp "$file" root/modules/
    echo "${file##*/}"
  done >root/modules/list
  cp "$here/init.sh" root/init
  chmod +x root/init
  (cd root && find . -print0 | cpio --null --create --format newc --quiet) >done/initrd
  find "$cache" -mindepth 1 -maxdepth 1 -type d ! -name "making.*" -mtime +30 -exec rm -rf {} + # of old scripts
  mv done "$made"
fi
echo "$made"
