"""Published weights as files, each folder under a name of its own.

A name says who wrote it, down to the process, and is never used again. So a server that caches
prompts by the adapter's name never confuses two. The files are what a server is given again after
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
from tinkercloud_worker.checkpoints import formats, tensor_file
from tinkercloud_worker.engine.trainer import RemoteModel, WeightsSnapshot
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.model.architecture import as_in_files, from_files


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Weights that have been saved as files."""

    name: str
    local_dir: Path
    """Their folder."""
    server_dir: Path | None
    """The same folder as servers see it; None if they don't."""
    remote: RemoteModel | None = None
    """What `fetch` copies the files from; None if they were written to this folder."""

    def fetch(self) -> None:
        """Have the files in the local folder. Repeating it is fine.

        Raises:
            NotFound: they are gone.
        """
        if self.remote is not None:
            self.remote.fetch(self.local_dir)

    def tensor_names(self) -> Sequence[str]:
        """Return the names of a whole model's tensors, as in its file.

        Raises:
            NotFound: somebody has removed it.
        """
        if self.remote is not None:
            return self.remote.tensor_names
        try:
            return tensor_names(self.local_dir / FULL_WEIGHTS)
        except FileNotFoundError:
            raise NotFound(f"{self.local_dir} is gone: save the weights again") from None

    def size_of(self, file: str) -> int:
        """Return the bytes of one of its files.

        Raises:
            NotFound: somebody has removed it.
        """
        try:
            return (self.local_dir / file).stat().st_size
        except FileNotFoundError:
            raise NotFound(f"{self.local_dir} is gone: save the weights again") from None


def tensor_names(file: Path) -> Sequence[str]:
    """Return the names of the tensors in a safetensors file.

    Raises:
        FileNotFoundError: it is not there.
    """
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


class WeightsFolder:
    """Files of published weights. Methods block; they may be called from several threads."""

    def __init__(
        self, folder: Path, *, server_dir: Path | None, owner: str, base_path: Path
    ) -> None:
        """Take charge of a folder, which is made when first needed.

        Args:
            folder: where to write.
            server_dir: the same folder as servers see it; None if they don't.
            owner: differs between any two processes that ever write there.
            base_path: Hugging Face folder of the base model.
        """
        self._folder = folder
        self._server_dir = server_dir
        self._owner = owner
        self._base_path = base_path
        self._numbers = itertools.count(1)
        self._written: set[str] = set()
        """Names whose folders were written here."""
        self._remote: dict[str, RemoteModel] = {}
        """Models whose files are elsewhere, and here only once they are needed."""

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

    def register_remote(self, model: RemoteModel) -> str:
        """Register a whole model whose files are elsewhere; return its name."""
        self._remote[model.name] = model
        return model.name

    def find(self, name: str) -> SavedWeights:
        """Return where the weights of a name are."""
        server_dir = self._server_dir / name if self._server_dir is not None else None
        return SavedWeights(name, self._folder / name, server_dir, self._remote.get(name))

    def read(self, name: str, config: LoraConfig | None) -> WeightsSnapshot:
        """Read weights back.

        Raises:
            NotFound: somebody has removed them.
        """
        file = FULL_WEIGHTS if config is None else ADAPTER_WEIGHTS
        self.find(name).fetch()
        try:
            tensors = load_file(self._folder / name / file)
        except FileNotFoundError:
            raise NotFound(f"{self._folder / name} is gone: save the weights again") from None
        if config is None:
            return WeightsSnapshot(None, from_files(str(self._base_path), tensors))
        return WeightsSnapshot(config, adapters.from_peft_names(tensors))

    def remove(self, name: str) -> None:
        """Remove the weights of a name, wherever they are. They may be gone."""
        if (remote := self._remote.pop(name, None)) is not None:
            remote.remove()
        shutil.rmtree(self._folder / name, ignore_errors=True)
        self._written.discard(name)

    def remove_all(self) -> None:
        """Remove all that was written here, and nothing of others who write to the same folder."""
        for name in [*self._written, *self._remote]:
            self.remove(name)
