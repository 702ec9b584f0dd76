"""The settings of the programs of a real node, for restricted machines.

They work with cgroup v1 and v2, without systemd, without CAP_SYS_RESOURCE, and with containerd 1.6
and later.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkercloud_testing.cluster.image_build.programs import build_folder
from tinkercloud_testing.cluster.kube_api.control_plane import POD_RANGE, ControlPlane

PAUSE_IMAGE = "tinkercloud.test/pause:1"
CLUSTER_DNS = "10.96.0.10"
HOST_ADDRESS = "10.243.0.1"
REGISTRY = f"{HOST_ADDRESS}:5000"
"""Where nodes pull images over plain HTTP, if a test runs a registry there."""
_DEBIAN_CNI = "/usr/lib/cni"


@dataclass(frozen=True)
class NodeFiles:
    """The files with the settings of each program."""

    kubelet: Path
    kubelet_credentials: Path
    proxy: Path


def write(plane: ControlPlane, folder: Path, name: str, address: str) -> NodeFiles:
    """Write the settings of the kubelet and of kube-proxy into a node's folder."""
    (folder / "resolv.conf").touch()
    identity = f"system:node:{name}"
    credentials = plane.authority.kubeconfig(plane.url, identity, groups=["system:nodes"])
    proxy = plane.authority.kubeconfig(plane.url, "system:kube-proxy")
    files = NodeFiles(
        kubelet=folder / "kubelet.json",
        kubelet_credentials=credentials,
        proxy=folder / "kube-proxy.json",
    )
    files.kubelet.write_text(json.dumps(_kubelet(plane, folder, name, address)))
    files.proxy.write_text(json.dumps(_proxy(proxy)))
    return files


def write_containerd(folder: Path, store: Path) -> Path:
    """Write the settings of containerd into a folder and return their path.

    Args:
        folder: the folder of the node.
        store: the root folder of containerd, with its images.
    """
    network_folder(folder).mkdir()
    hosts = folder / "registries" / REGISTRY
    hosts.mkdir(parents=True)
    (hosts / "hosts.toml").write_text(
        f'[host."http://{REGISTRY}"]\n  capabilities = ["pull", "resolve"]\n'
    )
    path = folder / "containerd.toml"
    path.write_text(_containerd(folder, store))
    return path


def cgroup(name: str) -> str:
    """Return the name of the control group of all pods of a node."""
    return f"tinkercloud-node-{name}"


def network_folder(folder: Path) -> Path:
    """Return the folder from which containerd reads the network of pods."""
    return folder / "cni"


def pod_network(addresses: str, folder: Path) -> dict[str, Any]:
    """Return the pod network: a bridge with an address range such as "10.244.0.0/24"."""
    bridge = {
        "type": "bridge",
        "bridge": "pods",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": addresses}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(folder / "addresses"),
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]}


def image_store() -> Path:
    """Return the folder of the images of a machine's first node, which all runs share in turn."""
    return build_folder("kubectl").parent / "containerd"


def _containerd(folder: Path, store: Path) -> str:
    return f"""version = 2
root = "{store}"
state = "{folder}/containerd-state"

[grpc]
  address = "{folder}/containerd.sock"

# Garbage is only collected by command. At any other time it could be part of an image that is
# being imported.
[plugins."io.containerd.gc.v1.scheduler"]
  mutation_threshold = 1000000000
  startup_delay = "8760h"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  netns_mounts_under_state_dir = true
  # This machine may not be permitted to lower the OOM score of a process.
  restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = "{folder}/registries"

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{_DEBIAN_CNI}"
  conf_dir = "{network_folder(folder)}"

[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "overlayfs"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = false
"""


def _kubelet(plane: ControlPlane, folder: Path, name: str, address: str) -> dict[str, Any]:
    serving = plane.authority.issue(f"kubelet-{name}", hosts=[address, name])
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(plane.authority.certificate)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(serving.certificate),
        "tlsPrivateKeyFile": str(serving.key),
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup(name)}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": ["none"],
        # Tolerate that this machine may not set sysctls and OOM scores.
        "featureGates": {"KubeletInUserNamespace": True},
        "oomScoreAdj": 0,
        "clusterDNS": [CLUSTER_DNS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(folder / "resolv.conf"),
        "podLogsDir": str(folder / "pod-logs"),
        "volumePluginDir": str(folder / "volume-plugins"),
        # Images cannot be pulled again, so none is removed to save space.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi"},
    }


def _proxy(kubeconfig: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "mode": "iptables",
        "clusterCIDR": POD_RANGE,
        "conntrack": {"maxPerCore": 0, "min": 0},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    }
