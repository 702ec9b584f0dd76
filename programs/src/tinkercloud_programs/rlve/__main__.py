"""Runs RLVE: `python -m tinkercloud_programs.rlve CONFIG`, CONFIG being an RlveConfig as JSON."""

import sys

from pydantic import ValidationError

from tinkercloud_programs.server import ModelGone, ProgramServer
from tinkercloud_protocol.programs.program_messages import EXIT_FINAL
from tinkercloud_protocol.programs.rlve import RlveConfig


def main() -> None:
    """Train the model of this program's environment."""
    print("loading the environments of RLVE", flush=True)
    # It takes long, and the log should say so before.
    from tinkercloud_programs.rlve.loop import Trainer  # noqa: PLC0415

    try:
        config = RlveConfig.model_validate_json(sys.argv[1])
        Trainer(config, ProgramServer()).run()
    except (ModelGone, ValidationError, ValueError) as error:
        # Another attempt would fail in the same way.
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(EXIT_FINAL)


if __name__ == "__main__":
    main()
