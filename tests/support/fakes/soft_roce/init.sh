#!/bin/sh
# The first process of the virtual machine. Its root is the host's, on which it writes into memory;
# runs /exchange/guest.sh, whose files the host reads, and switches off.
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module" || echo "insmod $module failed"; done </modules/list
with=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "ro,$with,cache=loose" host /host || poweroff -f
mount -t tmpfs -o size=60% top /top
mkdir -p /top/upper /top/work
mount -t overlay -o lowerdir=/host,upperdir=/top/upper,workdir=/top/work overlay /root || poweroff -f
for folder in proc sys dev; do mount --bind /$folder /root/$folder; done
mkdir -p /root/dev/shm /root/exchange
mount -t tmpfs shm /root/dev/shm
mount -t tmpfs run /root/run
mount -t 9p -o "rw,$with,cache=none" exchange /root/exchange || poweroff -f
ln -s /proc/self/fd/0 /dev/stdin
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr
ln -s /proc/self/fd /dev/fd
ip link set lo up
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LANG=C.UTF-8
# By this the host sees that the machine is not frozen.
while cat /proc/uptime >/root/exchange/pulse; do sleep 2; done &
chroot /root /bin/bash /exchange/guest.sh
echo $? >/root/exchange/status
poweroff -f
