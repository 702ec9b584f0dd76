"""Parts of the custom resources that describe pods: resources, placement, extras, programs."""
