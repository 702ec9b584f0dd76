"""New BaseModels: cases for each rule."""

from typing import Any

from tinkercloud_testing.resource_rules.rule import Rule, base_model
from tinkercloud_testing.resources.sessions import (
    COLOCATED,
    ENGINES,
    EXTERNAL,
    SAMPLERS,
    TRAINERS,
    Json,
)

PLANNING = {"gpu": "H100", "config": "{}"}
GROUP: Json = {"processGroup": "gloo"}
NCCL: Json = {"processGroup": "nccl"}
TRAINERS_ON_CPUS: Json = {"replicas": 2, "cpuRanksPerReplica": 1}


def source(**parts: Any) -> Json:
    return base_model(source=parts)


def volume(path: str) -> Json:
    return source(volume={"claimName": "models", "path": path})


def trainer(replicas: int, gpus: int, backend: str = "torch", **parallelism: int) -> Json:
    counts = {"replicas": replicas, "gpusPerReplica": gpus}
    return base_model(trainer={"backend": backend, **counts, "parallelism": parallelism})


def cpu_trainer(
    replicas: int, ranks: int, gpus: int = 0, backend: str = "megatron", **parallelism: int
) -> Json:
    counts = {"replicas": replicas, "gpusPerReplica": gpus, "cpuRanksPerReplica": ranks}
    return base_model(trainer={"backend": backend, **counts, "parallelism": parallelism})


def sharded(backend: str = "torch", replicas: int = 2, gpus: int = 1) -> Json:
    counts = {"replicas": replicas, "gpusPerReplica": gpus}
    return base_model(trainer={"backend": backend, **counts, "sharded": True})


def planned(
    gpus: int = 4, backend: str = "megatron", dtype: str | None = None, **parallelism: int
) -> Json:
    counts = {"replicas": 2 if gpus else 0, "gpusPerReplica": gpus}
    parts = {"planning": PLANNING, "parallelism": parallelism}
    chosen = {} if dtype is None else {"dtype": dtype}
    return base_model(trainer={"backend": backend, **counts, **parts, **chosen})


def sampler(backend: str, replicas: int, gpus: int = 1, **others: Any) -> Json:
    counts = {"replicas": replicas, "gpusPerReplica": gpus}
    return base_model(trainer=TRAINERS, sampler={"backend": backend, **counts, **others})


def sglang(replicas: int, gpus: int = 1, **others: Any) -> Json:
    """Return a sampler whose engines have only an image."""
    return sampler("sglang", replicas, gpus, image="sglang:1", **others)


def engines(**others: Any) -> Json:
    return base_model(trainer=TRAINERS, sampler=ENGINES | others)


def colocated(sampler: Json | None = None, trainer: Json | None = None, **engines: Any) -> Json:
    sampler_spec = COLOCATED | {"engines": COLOCATED["engines"] | engines} | (sampler or {})
    return base_model(trainer=TRAINERS | (trainer or {}), sampler=sampler_spec)


def scaled(least: int, most: int, **others: Any) -> Json:
    """Return a BaseModel whose number of engines follows the load."""
    bounds = {"minReplicas": least, "maxReplicas": most}
    return engines(**{"replicas": 0, "engines": bounds} | others)


def external(**others: Any) -> Json:
    return base_model(trainer=TRAINERS, sampler=EXTERNAL | others)


BASE_MODEL_RULES = (
    Rule(
        "spec.source",
        "revision: only valid with hub; remove it, or set hub",
        {
            "a commit": source(hub="a/b", revision="0" * 40),
            "a branch": source(hub="a/b", revision="refs/pr/1"),
            "no revision of a store": source(uri="s3://models/a"),
        },
        {
            "of a store": source(uri="s3://models/a", revision="v1"),
            "of a volume": source(volume={"claimName": "models", "path": "a"}, revision="v1"),
            "of another store": source(uri="gs://models/a", revision="0" * 40),
        },
    ),
    Rule(
        "spec.source",
        "set exactly one of hub, volume or uri",
        {
            "hub": source(hub="Qwen/Qwen3-8B"),
            "volume": volume("qwen"),
            "uri": source(uri="s3://models/qwen", secretName="store"),
        },
        {
            "none": source(secretName="store"),
            "hub and uri": source(hub="a/b", uri="s3://models/qwen"),
            "volume and uri": source(
                volume={"claimName": "models", "path": "a"}, uri="gs://models/qwen"
            ),
            "all": source(hub="a", volume={"claimName": "c", "path": "a"}, uri="az://b/c"),
        },
    ),
    Rule(
        "spec.source",
        "volume.path: must not contain '..'",
        {
            "folder": volume("qwen/3-8b"),
            "dots in a name": volume("qwen..old/8b"),
            "three dots": volume("..."),
        },
        {
            "parent": volume(".."),
            "through the parent": volume("../other"),
            "in the middle": volume("a/../../b"),
            "at the end": volume("a/.."),
        },
    ),
    Rule(
        "spec.trainer",
        "replicas: if 0, the head trains on its CPU: remove gpusPerReplica and"
        " cpuRanksPerReplica; if 1 or more, set exactly one of them",
        {
            "the head": trainer(0, 0),
            "one GPU": trainer(1, 1),
            "many GPUs": trainer(4, 8),
            "one rank on a CPU": cpu_trainer(1, 1),
            "many ranks on CPUs": cpu_trainer(512, 64),
        },
        {
            "replicas alone": trainer(1, 0),
            "many replicas alone": trainer(4, 0),
            "GPUs alone": trainer(0, 8),
            "ranks alone": cpu_trainer(0, 1, backend="torch"),
            "ranks in addition to GPUs": cpu_trainer(1, 2, gpus=2),
        },
    ),
    Rule(
        "spec.trainer",
        "parallelism: tensor x pipeline x context must divide the number of ranks, which is"
        " replicas x gpusPerReplica (or cpuRanksPerReplica)",
        {
            "one copy": trainer(2, 8, "megatron", tensor=8, pipeline=2),
            "two copies": trainer(1, 8, "megatron", tensor=2, context=2),
            "over CPUs": cpu_trainer(2, 1, tensor=2),
        },
        {
            "more ranks than GPUs": trainer(1, 4, "megatron", tensor=8),
            "no divisor": trainer(1, 8, "megatron", tensor=3),
            "the product is none": trainer(2, 2, "megatron", tensor=2, pipeline=2, context=2),
            "more ranks than CPUs have": cpu_trainer(2, 1, tensor=4),
        },
    ),
    Rule(
        "spec.trainer",
        "parallelism: tensor x pipeline x expert must divide the number of ranks, which is"
        " replicas x gpusPerReplica (or cpuRanksPerReplica)",
        {
            "over data-parallel ranks": trainer(1, 8, "megatron", tensor=2, expert=4),
            "over context-parallel ranks": trainer(1, 4, "megatron", context=4, expert=4),
            "over CPUs": cpu_trainer(2, 1, expert=2),
        },
        {
            "more experts' ranks than there are": trainer(1, 4, "megatron", expert=64),
            "in addition to tensor": trainer(1, 4, "megatron", tensor=2, expert=4),
            "no divisor": cpu_trainer(4, 1, expert=3),
        },
    ),
    Rule(
        "spec.trainer",
        "parallelism: not supported by backend torch; remove it, or set backend to megatron",
        {
            "megatron": trainer(1, 4, "megatron", tensor=2),
            "ones": trainer(1, 4, tensor=1, pipeline=1, context=1, expert=1),
            "nothing said": cpu_trainer(2, 2, backend="torch"),
        },
        {
            "tensor": trainer(1, 4, tensor=2),
            "pipeline": cpu_trainer(2, 2, backend="torch", pipeline=2),
            "context": trainer(1, 4, context=2),
            "expert": trainer(1, 4, expert=2),
        },
    ),
    Rule(
        "spec.trainer",
        "sharded: only valid for backend torch with trainer pods; remove it",
        {
            "two pods": sharded(),
            "many GPUs": sharded(gpus=8),
            "copies": trainer(2, 1, "torch"),
        },
        {
            "megatron": sharded("megatron"),
            "megatron of many GPUs": sharded("megatron", gpus=8),
            "the head": sharded(replicas=0, gpus=0),
        },
    ),
    Rule(
        "spec.trainer",
        "planning: only valid for backend megatron with gpusPerReplica; set both, or remove it",
        {
            "megatron on GPUs": planned(),
            "without planning": trainer(2, 4, "torch"),
            "without planning or GPUs": cpu_trainer(2, 1),
        },
        {
            "torch": planned(backend="torch"),
            "torch in the head": planned(0, "torch"),
            "no GPUs": base_model(
                trainer={
                    "backend": "megatron",
                    "replicas": 1,
                    "cpuRanksPerReplica": 1,
                    "planning": PLANNING,
                }
            ),
        },
    ),
    Rule(
        "spec.trainer",
        "planning: not valid with parallelism, because the operator chooses it; remove one of them",
        {
            "planning alone": planned(),
            "ones": planned(tensor=1, pipeline=1, context=1, expert=1),
            "parallelism alone": trainer(2, 4, "megatron", tensor=2),
        },
        {
            "tensor": planned(tensor=2),
            "context": planned(context=2),
            "expert": planned(expert=2),
        },
    ),
    Rule(
        "spec.trainer",
        "planning: requires dtype bfloat16; remove dtype or planning",
        {
            "nothing said": planned(),
            "bfloat16": planned(dtype="bfloat16"),
            "float32 without planning": base_model(trainer=TRAINERS | {"dtype": "float32"}),
        },
        {
            "float32": planned(dtype="float32"),
            "float32 on many GPUs": planned(16, dtype="float32"),
            "float32 with its parallelism": planned(dtype="float32", tensor=1),
        },
    ),
    Rule(
        "spec.trainer",
        "backend: megatron requires trainer pods; set replicas to 1 or more",
        {
            "torch in the head": trainer(0, 0, "torch"),
            "torch on workers": trainer(2, 1, "torch"),
            "megatron on workers": trainer(2, 1, "megatron"),
        },
        {
            "no replicas": trainer(0, 0, "megatron"),
            "nothing else said": base_model(trainer={"backend": "megatron"}),
            "with samplers": base_model(trainer={"backend": "megatron"}, sampler=SAMPLERS),
        },
    ),
    Rule(
        "spec.sampler",
        "replicas: must be 0 for backends torch (the head samples) and external (the servers are"
        " not pods of the session); for sglang, set either replicas to 1 or more, or"
        " engines.minReplicas and engines.maxReplicas",
        {
            "torch": sampler("torch", 0, 0),
            "one engine": sglang(1),
            "many engines": sglang(64),
            "external": external(),
            "engines that follow the load": scaled(1, 4),
        },
        {
            "torch with a pod": sampler("torch", 1),
            "torch with pods": sampler("torch", 8),
            "sglang without": sglang(0),
            "a fixed number and bounds": scaled(1, 4, replicas=2),
            "external with a pod": external(replicas=1),
        },
    ),
    Rule(
        "spec.sampler",
        "external: required for backend external, and not valid for others",
        {
            "both": external(),
            "neither": sampler("torch", 0, 0),
            "neither, with engines": sglang(1),
        },
        {
            "backend alone": base_model(sampler={"backend": "external"}),
            "servers alone": external(backend="torch"),
            "servers in addition to engines": engines(external=EXTERNAL["external"]),
        },
    ),
    Rule(
        "spec.sampler",
        "sampledLogprobs: inference servers only return the model's own logprobs; remove it, or"
        " set backend to torch",
        {
            "tempered, torch": sampler("torch", 0, 0, sampledLogprobs="tempered"),
            "the model's, torch": sampler("torch", 0, 0, sampledLogprobs="model"),
            "the model's, sglang": sglang(1, sampledLogprobs="model"),
        },
        {
            "tempered, sglang": sglang(1, sampledLogprobs="tempered"),
            "tempered, external": external(sampledLogprobs="tempered"),
            "tempered, colocated": colocated({"sampledLogprobs": "tempered"}),
        },
    ),
    Rule(
        "spec.sampler",
        "gpusPerReplica, colocated: not valid for backend external; remove both",
        {
            "external": external(),
            "engines with GPUs": engines(gpusPerReplica=8),
            "colocated ones": colocated(),
        },
        {
            "a GPU": external(gpusPerReplica=1),
            "colocated": external(colocated=True),
            "GPUs and colocated": external(gpusPerReplica=8, colocated=True),
        },
    ),
    Rule(
        "spec.sampler",
        "engines: only valid for backend sglang; remove it",
        {
            "engines": engines(),
            "with a part of the memory": engines(
                engines={**ENGINES["engines"], "gpuMemoryPercent": 80, "maxCachedTokens": 65536}
            ),
            "without": sglang(1),
            "colocated": colocated(),
        },
        {
            "torch": engines(backend="torch", replicas=0, gpusPerReplica=0),
            "torch without a pod": base_model(sampler={"engines": {}}),
            "external": external(engines=ENGINES["engines"], image="sglang:1"),
        },
    ),
    Rule(
        "spec.sampler",
        "engines.maxReplicas: not valid for colocated engines, whose number follows from the"
        " trainers; remove it and minReplicas, and set replicas",
        {
            "own pods": scaled(2, 2),
            "with a placement": scaled(1, 4, placement={"nodeSelector": {"gpu": "l40s"}}),
            "with variables": scaled(1, 4, environment=[{"name": "NCCL_DEBUG", "value": "INFO"}]),
            "colocated": colocated(),
        },
        {
            "colocated": colocated(minReplicas=1, maxReplicas=4),
            "colocated, equal": colocated(minReplicas=4, maxReplicas=4),
            "colocated, one": colocated(minReplicas=1, maxReplicas=1),
        },
    ),
    Rule(
        "spec.sampler.engines",
        "minReplicas: must not exceed maxReplicas",
        {"less": scaled(1, 64), "equal": scaled(3, 3), "neither": engines()},
        {"more": scaled(2, 1), "much more": scaled(64, 1), "one more": scaled(4, 3)},
    ),
    Rule(
        "spec.sampler.engines",
        "minReplicas, maxReplicas: set both, or neither",
        {"both": scaled(1, 2), "neither": engines(), "nothing": engines(engines={})},
        {
            "a minimum alone": engines(engines={"minReplicas": 1}),
            "a maximum alone": engines(replicas=0, engines={"maxReplicas": 1}),
            "a maximum and a number": engines(engines={"maxReplicas": 2}),
        },
    ),
    Rule(
        "spec.sampler.engines",
        "loraTargetModules: 'all' is not a module name; remove the field to target all modules",
        {
            "modules": engines(engines={"loraTargetModules": ["q_proj", "lm_head"]}),
            "one": engines(engines={"loraTargetModules": ["o_proj"]}),
            "left out": engines(engines={}),
        },
        {
            "all": engines(engines={"loraTargetModules": ["all"]}),
            "all before others": engines(engines={"loraTargetModules": ["all", "q_proj"]}),
            "all after others": engines(engines={"loraTargetModules": ["q_proj", "all"]}),
        },
    ),
    Rule(
        "spec.sampler",
        "engines.deviceClassName: required for colocated engines, which share GPUs through a"
        " DeviceClass, and not valid for others; set both colocated and deviceClassName, or"
        " neither",
        {
            "both": colocated(),
            "another class": colocated(deviceClassName="mig.nvidia.com"),
            "neither": engines(),
            "neither, and nothing said of engines": sglang(1),
            "colocated torch": sampler("torch", 0, 0, colocated=True),
        },
        {
            "colocated alone": colocated(sampler={"engines": {}}),
            "colocated, and nothing said of engines": sglang(8, colocated=True),
            "colocated with a volume": colocated(sampler={"engines": ENGINES["engines"]}),
            "a class alone": engines(engines=COLOCATED["engines"]),
        },
    ),
    Rule(
        "spec.sampler",
        "engines.processGroup: not valid for colocated engines; remove it",
        {
            "one engine": engines(replicas=1, engines=GROUP),
            "many that read adapters": engines(engines=ENGINES["engines"] | GROUP),
            "colocated without": colocated(),
        },
        {
            "colocated": colocated(**GROUP),
            "one that has a whole pod": colocated(
                {"gpusPerReplica": 4, "replicas": 1}, {"replicas": 1}, **GROUP
            ),
            "colocated without a class": engines(colocated=True, engines=GROUP),
        },
    ),
    Rule(
        "spec",
        "sampler.engines.processGroup: nccl requires trainer pods with GPUs; set"
        " trainer.replicas and trainer.gpusPerReplica, or use gloo",
        {
            "trainers on GPUs": engines(engines=NCCL),
            "gloo from CPUs": base_model(
                trainer=TRAINERS_ON_CPUS, sampler=ENGINES | {"engines": GROUP}
            ),
            "gloo from the head": base_model(sampler=ENGINES | {"engines": GROUP}),
        },
        {
            "trainers on CPUs": base_model(
                trainer=TRAINERS_ON_CPUS, sampler=ENGINES | {"engines": NCCL}
            ),
            "a head that trains": base_model(sampler=ENGINES | {"engines": NCCL}),
            "GPUs of no trainer": base_model(
                trainer={"replicas": 0, "gpusPerReplica": 0}, sampler=ENGINES | {"engines": NCCL}
            ),
        },
    ),
    Rule(
        "spec.sampler",
        "image, replicas: backend sglang requires an image with SGLang and at most 64 replicas;"
        " set image, and lower replicas if necessary",
        {
            "one": engines(),
            "one, and nothing said of engines": sglang(1),
            "64": engines(replicas=64),
        },
        {
            "no image": sampler("sglang", 2, engines=ENGINES["engines"]),
            "no image, and nothing said of engines": sampler("sglang", 2),
            "65": engines(replicas=65),
            "65, and nothing said of engines": sglang(65),
            "512": engines(replicas=512),
        },
    ),
    Rule(
        "spec",
        "sampler.colocated: requires trainers with GPUs; set trainer.gpusPerReplica",
        {
            "with trainers": colocated(),
            "of its own": base_model(sampler=SAMPLERS),
            "torch with trainers": sampler("torch", 0, 0, colocated=True),
        },
        {
            "without trainers": base_model(sampler={**SAMPLERS, "colocated": True}),
            "alongside a CPU trainer": base_model(
                trainer={"replicas": 2, "cpuRanksPerReplica": 1},
                sampler={**SAMPLERS, "colocated": True},
            ),
            "torch in the head": base_model(sampler={"colocated": True}),
        },
    ),
    Rule(
        "spec",
        "sampler.gpusPerReplica: must be 1 or more for sglang engines that are not colocated",
        {
            "one GPU": sglang(1, 1),
            "shared ones": colocated(),
            "torch": sampler("torch", 0, 0),
        },
        {
            "none": sglang(1, 0),
            "none for many": sglang(8, 0),
            "nothing said": base_model(
                sampler={"backend": "sglang", "image": "sglang:1", "replicas": 1}
            ),
        },
    ),
    Rule(
        "spec",
        "sampler.gpusPerReplica: must divide trainer.gpusPerReplica, because colocated engines"
        " run inside the trainer pods",
        {
            "half a pod": colocated(),
            "a whole pod": colocated(sampler={"gpusPerReplica": 4, "replicas": 2}),
            "one GPU": colocated(sampler={"gpusPerReplica": 1, "replicas": 8}),
            "engines with pods of their own": engines(gpusPerReplica=3),
            "torch": sampler("torch", 0, 3, colocated=True),
        },
        {
            "none": colocated(sampler={"gpusPerReplica": 0}),
            "no divisor": colocated(sampler={"gpusPerReplica": 3}),
            "more than a pod has": colocated(sampler={"gpusPerReplica": 8, "replicas": 1}),
        },
    ),
    Rule(
        "spec",
        "sampler.replicas: must be trainer.replicas x trainer.gpusPerReplica /"
        " sampler.gpusPerReplica, because colocated engines use all GPUs of the trainers",
        {
            "two in each pod": colocated(),
            "more pods": colocated(sampler={"replicas": 6}, trainer={"replicas": 3}),
            "engines with pods of their own": engines(replicas=5),
            "torch": sampler("torch", 0, colocated=True),
        },
        {
            "one too few": colocated(sampler={"replicas": 3}),
            "one too many": colocated(sampler={"replicas": 5}),
            "one in each pod": colocated(sampler={"replicas": 2}),
            "fewer pods": colocated(trainer={"replicas": 1}),
        },
    ),
)
