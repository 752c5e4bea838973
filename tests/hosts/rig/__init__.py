"""Several hosts on one machine, as namespaces: what a cluster does, without having one."""
