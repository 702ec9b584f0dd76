"""The session head, which holds a base model and trains and samples models of it, and its ranks.

Packages:

- `engine`: what a trainer and a sampler are: types and interfaces, no implementation.
- `head`: speaks HTTP and keeps order. It is given a trainer and a sampler, and knows nothing of
  how they work.
- `torch_trainer`: trains with torch, in the head's process or at ranks.
- `megatron_trainer`: trains at ranks with megatron-core.
- `torch_sampler`: samples with torch, in the head's process.
- `inference`: samples from inference servers (SGLang, vLLM).
- `actors`: ranks as Ray actors.
- `checkpoints`: reads and writes the object store.

Modules that they share, by subject:

- the model: `base_model`, `architecture`, `load`, `self_check`, `quantized`, `kernels`, `packing`,
  `frozen_linear`
- its files: `weight_files`, `weights_check`, `fingerprint`
- adapters: `lora`
- training: `training`, `losses`
- devices: `accelerator`, `matmul`
- what is seen of a process: `logs`, `metrics`

Assembly: `__main__` starts `run_head`, for which `build_trainer` and `build_sampler` choose. Other
commands are `fetch_model` and `convert_gguf`. Which module may import which says `.importlinter`.
"""
