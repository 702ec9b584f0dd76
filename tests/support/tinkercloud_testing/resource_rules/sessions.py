"""New TrainingSessions: cases for each rule."""

from tinkercloud_testing.resource_rules.rule import Rule, session
from tinkercloud_testing.resources.sessions import Json

ATTENTION, MLP, UNEMBED = "trainAttention", "trainMlp", "trainUnembed"
RESTORED = {"path": "tinker://run:train:0/weights/last"}
SAMPLER: Json = {"role": "Sampler", "lora": None}


def lora(**fields: bool) -> Json:
    return session(lora={"rank": 8, **fields})


SESSION_RULES = (
    Rule(
        "",
        "metadata.name: must have at most 40 characters of a-z, 0-9 and -, and start with a"
        " letter, because its RayCluster and Services are named after it",
        {
            "one letter": session("a"),
            "letters and digits": session("ts-4f9c2a71-0"),
            "40 characters": session("a" * 40),
        },
        {
            "41 characters": session("a" * 41),
            "a digit first": session("4f9c"),
            "a dot": session("my.session"),
        },
    ),
    Rule(
        "spec.lora",
        "at least one of trainAttention, trainMlp and trainUnembed must be true",
        {
            "attention": lora(**{MLP: False, UNEMBED: False}),
            "MLP": lora(**{ATTENTION: False, UNEMBED: False}),
            "unembedding": lora(**{ATTENTION: False, MLP: False}),
        },
        {
            "none": lora(**{ATTENTION: False, MLP: False, UNEMBED: False}),
            "none, default rank": session(lora={ATTENTION: False, MLP: False, UNEMBED: False}),
            "none, full rank": session(
                lora={"rank": 1024, ATTENTION: False, MLP: False, UNEMBED: False}
            ),
        },
    ),
    Rule(
        "spec",
        "role: lora, restoreFrom and trainer are not valid for role Sampler; remove them",
        {
            "sampler": session(**SAMPLER),
            "fewer samplers": session(**SAMPLER, sampler={"replicas": 1}),
            "trainer with all": session(restoreFrom=RESTORED, trainer={"replicas": 1}),
        },
        {
            "lora": session(**SAMPLER | {"lora": {"rank": 8}}),
            "restoreFrom": session(**SAMPLER, restoreFrom=RESTORED),
            "trainer": session(**SAMPLER, trainer={"replicas": 1}),
        },
    ),
)
