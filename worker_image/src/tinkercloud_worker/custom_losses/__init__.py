"""The losses that clients upload (`tinkercloud_protocol.losses.traced_losses`).

- `uploaded`: an uploaded loss in a request, as trainers see it.
- `processes`: computes losses in processes of their own, in turn for their owners.
- `nursery`, `child`: starts such a process, and what runs in it.
- `messages`: how both exchange tensors.
- `costs`: what a loss will cost; runs in the process only.
- `graphs`: reads a loss, also in the head, and interprets it, in the process only.
- `inputs`: the inputs of a loss.
"""
