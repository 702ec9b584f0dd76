// What holds a pod's namespaces open on the real node of the test cluster.
module tinkercloud.dev/tools/cluster/pause

go 1.26.0
