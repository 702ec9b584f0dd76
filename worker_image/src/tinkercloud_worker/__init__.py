"""The session head, which trains and samples models of one base model, and its trainer's ranks.

Packages:

- `engine`: interfaces and types of trainers and samplers, without implementations.
- `head`: HTTP API, request order and results. It uses a trainer and a sampler only through
  `engine`.
- `torch_trainer`: trains with torch, in the head's process or at ranks.
- `megatron_trainer`: trains with megatron-core at ranks.
- `torch_sampler`: samples with torch, in the head's process.
- `inference`: samples from inference servers (SGLang, vLLM).
- `actors`: runs ranks as Ray actors.
- `checkpoints`: reads and writes checkpoints in the object store.

Shared packages and modules:

- `model`: architecture, loading, checks and self-check of the base model.
- `lora`: LoRA adapters: parameters, layers, experts.
- `training`: optimizer, micro-batches and gradient sums that all trainers share.
- `device`: accelerators, memory, kernels and packing.
- `losses`: the loss functions.
- `custom_losses`: the losses that clients upload, computed in processes of their own.
- `logs`, `metrics`: logging and Prometheus metrics.

Assembly: `__main__` starts `run_head`, which uses `build_trainer` and `build_sampler`. The other
programs are `fetch_model`, `convert_gguf` and `untie`. `.importlinter` says which module may import
which.
"""
