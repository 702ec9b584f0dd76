"""Published weights as files, each in a folder with a unique name.

A name identifies the process that wrote it and is never reused, so a server that caches prompts by
adapter name never confuses two adapters. Weights are reloaded from the files after a server
restarts, and servers that do not accept tensors in requests read the files. If the folder is in
memory (/dev/shm, or a memory volume that the containers of a pod share), nothing is written to
disk.
"""

import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tinkercloud_protocol.heads.checkpoint_manifest import ADAPTER_WEIGHTS, FULL_WEIGHTS
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import NotFound, Unavailable
from tinkercloud_worker.checkpoints import formats, tensor_file
from tinkercloud_worker.engine.trainer import RemoteModel, WeightsCopy
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.model.architecture import as_in_files, from_files


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Weights saved as files."""

    name: str
    local_dir: Path
    """Folder with the files."""
    server_dir: Path | None
    """Path of the same folder in the servers; None if they can't read it."""
    remote: RemoteModel | None = None
    """Source from which `fetch` copies the files; None if they were written to this folder."""

    def fetch(self) -> None:
        """Ensure that the files are in the local folder. Idempotent.

        Raises:
            NotFound: the files do not exist any more.
        """
        if self.remote is not None:
            self.remote.fetch(self.local_dir)

    def tensor_names(self) -> Sequence[str]:
        """Return the names of a full model's tensors in its file.

        Raises:
            NotFound: the file was removed.
        """
        if self.remote is not None:
            return self.remote.tensor_names
        try:
            return tensor_names(self.local_dir / FULL_WEIGHTS)
        except FileNotFoundError:
            raise NotFound(f"{self.local_dir} no longer exists; save the weights again") from None

    def size_of(self, file: str) -> int:
        """Return the size of one of its files, in bytes.

        Raises:
            NotFound: the file was removed.
        """
        try:
            return (self.local_dir / file).stat().st_size
        except FileNotFoundError:
            raise NotFound(f"{self.local_dir} no longer exists; save the weights again") from None


def tensor_names(file: Path) -> Sequence[str]:
    """Return the names of the tensors in a safetensors file.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


class WeightsFolder:
    """Files of published weights. Methods block; they may be called from several threads."""

    def __init__(
        self, folder: Path, *, server_dir: Path | None, owner: str, base_path: Path, base_model: str
    ) -> None:
        """Use a folder, which is created when first needed.

        Args:
            folder: where to write.
            server_dir: path of the same folder in the servers; None if they can't read it.
            owner: unique name of this process among all that ever write to the folder.
            base_path: Hugging Face folder of the base model.
            base_model: name of the base model.
        """
        self._folder = folder
        self._server_dir = server_dir
        self._owner = owner
        self._base_path = base_path
        self._base_model = base_model
        self._numbers = itertools.count(1)
        self._written: set[str] = set()
        """Names written by this process."""
        self._remote: dict[str, RemoteModel] = {}
        """Models whose files are elsewhere, and are copied here when needed."""

    def write(self, weights: WeightsCopy) -> str:
        """Write weights and return their name.

        Adapters are written in PEFT's format with separate experts, full models as a Hugging Face
        folder in the layout of the base model.

        Raises:
            Unavailable: writing failed, for example for lack of space; partial files are removed.
        """
        name = f"{self._owner}-{next(self._numbers)}"
        target = self._folder / name
        self._written.add(name)
        try:
            target.mkdir(parents=True)
            if weights.lora is None:
                self._write_model(weights.tensors, target)
            else:
                for file, content in formats.encode_for_servers(weights, self._base_model).items():
                    (target / file).write_bytes(content)
        except OSError as error:
            self.remove(name)
            raise Unavailable(
                f"failed to write weights of {weights.size_bytes} bytes to {self._folder}:"
                f" {error.strerror or error}; enlarge its volume, or lower"
                " limits.max_snapshot_bytes"
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
        """Register a full model whose files are elsewhere; return its name."""
        self._remote[model.name] = model
        return model.name

    def find(self, name: str) -> SavedWeights:
        """Return the location of weights."""
        server_dir = self._server_dir / name if self._server_dir is not None else None
        return SavedWeights(name, self._folder / name, server_dir, self._remote.get(name))

    def read(self, name: str, config: LoraConfig | None) -> WeightsCopy:
        """Read weights.

        Raises:
            NotFound: the files were removed.
        """
        file = FULL_WEIGHTS if config is None else ADAPTER_WEIGHTS
        self.find(name).fetch()
        try:
            tensors = load_file(self._folder / name / file)
        except FileNotFoundError:
            raise NotFound(
                f"{self._folder / name} no longer exists; save the weights again"
            ) from None
        if config is None:
            return WeightsCopy(None, from_files(str(self._base_path), tensors))
        return WeightsCopy(config, adapters.from_peft_names(tensors))

    def remove(self, name: str) -> None:
        """Remove weights here and at their source. They may be gone already."""
        if (remote := self._remote.pop(name, None)) is not None:
            remote.remove()
        shutil.rmtree(self._folder / name, ignore_errors=True)
        self._written.discard(name)

    def remove_all(self) -> None:
        """Remove all weights of this process, but none of others that use the same folder."""
        for name in [*self._written, *self._remote]:
            self.remove(name)
