#!/usr/bin/env bash
# In the virtual machine, once: two rails, each a pair of soft-RoCE devices with a cable between them:
# rail0a (10.0.0.1) and rail0b (10.0.0.2), rail1a (10.1.0.1) and rail1b (10.1.0.2).
# All in one network namespace, as this kernel's soft RoCE wants it; so a host talks to itself over
# a cable, which it only does if it is set to.
set -euo pipefail
setting() { echo "$2" >"/proc/sys/net/ipv4/conf/$1"; }
for where in all default; do
  setting $where/accept_local 1
  setting $where/rp_filter 0
done
for rail in 0 1; do
  ip link add net${rail}a mtu 4500 type veth peer name net${rail}b mtu 4500
  ip addr add 10.$rail.0.1/24 dev net${rail}a
  ip addr add 10.$rail.0.2/24 dev net${rail}b
  for end in a b; do
    net=net$rail$end
    setting $net/rp_filter 0
    setting $net/accept_local 1
    setting $net/arp_ignore 1
    setting $net/arp_announce 2
    ip link set $net up
    rdma link add rail$rail$end type rxe netdev $net
  done
done
