"""Programs: cases for each rule."""

from collections.abc import Mapping

from tinkercloud_testing.resource_rules.rule import Rule, base_model, session
from tinkercloud_testing.resources.sessions import PROGRAM, PROGRAMS, Json

SOURCE: Json = {"sourceSecret": {"name": "source"}}
WITHOUT_MODULE: Json = {key: value for key, value in PROGRAM.items() if key != "module"}


def program(**fields: object) -> Json:
    return session(program=PROGRAM | fields)


def with_variable(name: str) -> Json:
    return program(env=[{"name": name, "value": "1"}])


CHANGES: Mapping[str, Json] = {
    "module": {"module": "another"},
    "arguments": {"args": []},
    "variables": {"env": [{"name": "A", "value": "1"}]},
    "image": {"image": "programs:2"},
    "key": {"apiKeySecret": {"name": "another"}},
}
"""Changes that make another program."""

PROGRAM_RULES = (
    Rule(
        "spec.program",
        "set exactly one of module and sourceSecret",
        {
            "module": program(),
            "source": session(program=WITHOUT_MODULE | SOURCE),
            "source with arguments": session(program=WITHOUT_MODULE | SOURCE | {"args": ["a"]}),
        },
        {
            "both": program(**SOURCE),
            "neither": session(program=WITHOUT_MODULE),
            "neither, stopped": session(program=WITHOUT_MODULE | {"stop": True}),
        },
    ),
    Rule(
        "spec.program",
        "is immutable except for stop; set another id to replace the program",
        {
            "stopped": program(stop=True),
            "suspended": session(program=PROGRAM, suspend=True),
            "removed": session(),
            "replaced": program(id="another", args=["b"]),
        },
        {title: program(**change) for title, change in CHANGES.items()},
        before=program(),
    ),
    Rule(
        "spec.program.env",
        "TINKER_API_KEY, TINKER_BASE_URL, HF_ENDPOINT, HOME and names that start with TINKERCLOUD_"
        " are set by the operator; remove them",
        {
            "another": with_variable("WANDB_MODE"),
            "tags": with_variable("TINKER_TAGS"),
            "lower case": with_variable("home"),
        },
        {
            "key": with_variable("TINKER_API_KEY"),
            "address": with_variable("TINKER_BASE_URL"),
            "prefix": with_variable("TINKERCLOUD_PROGRAM_ID"),
        },
    ),
    Rule(
        "spec.programs",
        "defaultImage: must be one of images",
        {
            "none": base_model(programs=PROGRAMS),
            "first": base_model(programs=PROGRAMS | {"defaultImage": "programs:1"}),
            "last": base_model(programs=PROGRAMS | {"defaultImage": "programs:2"}),
        },
        {
            "another": base_model(programs=PROGRAMS | {"defaultImage": "programs:3"}),
            "part of one": base_model(programs=PROGRAMS | {"defaultImage": "programs"}),
            "other case": base_model(programs=PROGRAMS | {"defaultImage": "Programs:1"}),
        },
    ),
)
