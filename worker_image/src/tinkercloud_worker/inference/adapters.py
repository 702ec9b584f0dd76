"""Published weights as files, each folder under a name of its own.

A name says who wrote it, down to the process, and is never used again. So a server that keeps
prompts by the adapter's name never mixes two up. The files are what a server is given again after
a restart, and what servers read that take no tensors in requests. Where the folder is in memory
(/dev/shm, or a volume of that kind that a pod's containers share), nothing touches a disk.
"""

import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tinkercloud_protocol.checkpoints import ADAPTER_WEIGHTS, FULL_WEIGHTS
from tinkercloud_protocol.errors import NotFound, Unavailable
from tinkercloud_protocol.hyperparameters import LoraConfig
from tinkercloud_worker import lora
from tinkercloud_worker.architecture import as_in_files, from_files
from tinkercloud_worker.checkpoints import formats, tensor_file
from tinkercloud_worker.engine.trainer import PlacedModel, WeightsSnapshot


@dataclass(frozen=True, slots=True)
class Written:
    """Weights that have been written."""

    name: str
    here: Path
    """Their folder."""
    there: Path | None
    """The same folder as servers see it; None if they don't."""
    placed: PlacedModel | None = None
    """What it is copied from, once it is needed here; None: it has been here from the beginning."""

    def bring(self) -> None:
        """Have the files here. Repeating it is fine.

        Raises:
            NotFound: they are gone.
        """
        if self.placed is not None:
            self.placed.fetch(self.here)

    def tensor_names(self) -> Sequence[str]:
        """Return the names of a whole model's tensors, as in its file.

        Raises:
            NotFound: somebody has removed it.
        """
        if self.placed is not None:
            return self.placed.tensor_names
        try:
            return tensor_names(self.here / FULL_WEIGHTS)
        except FileNotFoundError:
            raise NotFound(f"{self.here} is gone: save the weights again") from None

    def size_of(self, file: str) -> int:
        """Return the bytes of one of its files.

        Raises:
            NotFound: somebody has removed it.
        """
        try:
            return (self.here / file).stat().st_size
        except FileNotFoundError:
            raise NotFound(f"{self.here} is gone: save the weights again") from None


def tensor_names(file: Path) -> Sequence[str]:
    """Return the names of the tensors in a safetensors file.

    Raises:
        FileNotFoundError: it is not there.
    """
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


class AdapterFolder:
    """Files of published weights. Methods block; they may be called from several threads."""

    def __init__(self, folder: Path, *, there: Path | None, owner: str, base_path: Path) -> None:
        """Make a folder's keeper; the folder itself is made when first needed.

        Args:
            folder: where to write.
            there: the same folder as servers see it; None if they don't.
            owner: differs between any two processes that ever write there.
            base_path: Hugging Face folder of the base model.
        """
        self._folder = folder
        self._there = there
        self._owner = owner
        self._base_path = base_path
        self._numbers = itertools.count(1)
        self._written: set[str] = set()
        """Names whose folders are there."""
        self._placed: dict[str, PlacedModel] = {}
        """What lies elsewhere, and has folders here only once they are needed."""

    def write(self, weights: WeightsSnapshot, base_model: str) -> str:
        """Write weights and return their name.

        An adapter is in PEFT's format, experts one by one; all weights of a model are a Hugging
        Face folder, in the form that the base model's has.

        Raises:
            Unavailable: they can't be written, as where there is no room; nothing is left of them.
        """
        name = f"{self._owner}-{next(self._numbers)}"
        target = self._folder / name
        self._written.add(name)
        try:
            target.mkdir(parents=True)
            if weights.lora is None:
                self._write_model(weights.tensors, target)
            else:
                for file, content in formats.encode_for_servers(weights, base_model).items():
                    (target / file).write_bytes(content)
        except OSError as error:
            self.remove(name)
            raise Unavailable(
                f"the {weights.size_bytes} bytes of these weights can't be written to"
                f" {self._folder}: {error.strerror or error}; have its volume made larger, or"
                " limits.max_snapshot_bytes lower"
            ) from error
        except BaseException:
            self.remove(name)
            raise
        return name

    def _write_model(self, tensors: Mapping[str, Tensor], target: Path) -> None:
        for path in self._base_path.glob("*.json"):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)
        with (target / FULL_WEIGHTS).open("wb") as file:
            tensor_file.write(as_in_files(str(self._base_path), tensors), file)

    def adopt(self, model: PlacedModel) -> str:
        """Take a whole model that lies elsewhere for one that was written here; return its name."""
        self._placed[model.name] = model
        return model.name

    def find(self, name: str) -> Written:
        """Return where lies what was written under a name."""
        there = self._there / name if self._there is not None else None
        return Written(name, self._folder / name, there, self._placed.get(name))

    def read(self, name: str, config: LoraConfig | None) -> WeightsSnapshot:
        """Read weights back.

        Raises:
            NotFound: somebody has removed them.
        """
        file = FULL_WEIGHTS if config is None else ADAPTER_WEIGHTS
        self.find(name).bring()
        try:
            tensors = load_file(self._folder / name / file)
        except FileNotFoundError:
            raise NotFound(f"{self._folder / name} is gone: save the weights again") from None
        if config is None:
            return WeightsSnapshot(None, from_files(str(self._base_path), tensors))
        return WeightsSnapshot(config, lora.from_peft_names(tensors))

    def remove(self, name: str) -> None:
        """Remove what was written under a name, wherever it lies. It may be gone."""
        if (placed := self._placed.pop(name, None)) is not None:
            placed.remove()
        shutil.rmtree(self._folder / name, ignore_errors=True)
        self._written.discard(name)

    def remove_all(self) -> None:
        """Remove all that was written here, and nothing of others who write to the same folder."""
        for name in [*self._written, *self._placed]:
            self.remove(name)
