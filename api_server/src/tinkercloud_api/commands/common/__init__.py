"""What all `tinkercloud` commands share: options, requests, output, progress, the local catalog."""
