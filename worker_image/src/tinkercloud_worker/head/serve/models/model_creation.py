"""Creates models."""

from dataclasses import dataclass

from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_worker.head.durable.durable_runs import Durability
from tinkercloud_worker.head.durable.suspension import Suspension
from tinkercloud_worker.head.model.autosaver import Autosaver
from tinkercloud_worker.head.model.live_model import LiveModel, new_model, too_many_models
from tinkercloud_worker.head.model.model_lifetime import ModelEvent
from tinkercloud_worker.head.model.model_registry import ModelRegistry
from tinkercloud_worker.head.serve.models.model_deletion import Spawn


@dataclass(frozen=True, slots=True)
class ModelCreation:
    """Adds new models to one head."""

    suspension: Suspension
    """Has the parts of the head that a model needs."""
    models: ModelRegistry
    durability: Durability
    autosaver: Autosaver
    spawn: Spawn

    def begin(self, model_id: ModelId, spec: ModelSpec) -> None:
        """Add a model, which is absent, and start to create it.

        The request that creates it fails if its owner has too many models.
        """
        name, parts = str(model_id), self.suspension
        limit = parts.backend.config.limits.max_models_per_owner
        refused = too_many_models(self.models.of_owner(spec.owner), spec.owner, limit)
        model = new_model(model_id, spec, parts.backend, parts.samplers, parts.results)
        self.models.add(name, ModelEvent.CREATE, model)
        self.autosaver.watch(model)
        if refused is None:
            self.models.start(name, self.spawn(self._begin(model)))
        else:
            self.models.apply(name, ModelEvent.STARTED)
            model.queue.submit(0, b"create", 0, model.creation(refused))

    async def _begin(self, model: LiveModel) -> None:
        """Queue the creation of a new model, once its journal has started."""
        name = str(model.model_id)
        try:
            await self.durability.begin(model)
        except BaseException:
            if self.models.in_memory.get(name) is model:
                self.models.apply(name, ModelEvent.NOT_STARTED)
                model.queue.close(f"model {name} could not be created")
                await self.durability.leave(name)
            self.suspension.backend.curves.depart(name, model.operations.curve)
            raise
        if self.models.in_memory.get(name) is not model:
            raise NotFound(f"model {name} was deleted")
        self.models.apply(name, ModelEvent.STARTED)
        model.queue.submit(0, b"create", 0, model.creation(None))
