"""Controllers in the cluster: the operator, KubeRay, Kueue, and the sessions they act on."""
