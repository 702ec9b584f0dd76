"""Training clients of the SDK for models that another process created."""

import tinker
from tinker import types
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

_FIRST_SAMPLER = 1 << 30
"""Sampling sessions of the model's own client count from 0."""


def attach(service: tinker.ServiceClient, model_id: str, next_seq_id: int) -> tinker.TrainingClient:
    """Return a training client that continues the order of an existing model.

    Args:
        service: the client; its session need not be that of the model.
        model_id: the model.
        next_seq_id: number of the model's next request, from `ProgramServer.attach`.
    """
    holder = service.holder

    async def describe() -> types.GetInfoResponse:
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            return await client.models.get_info(
                request=types.GetInfoRequest(model_id=types.ModelID(model_id))
            )

    info = holder.run_coroutine_threadsafe(describe()).result()
    index = int(model_id.rpartition(":")[2])
    training = tinker.TrainingClient(holder, index, types.ModelID(model_id), info=info)
    # The SDK counts requests from 0 and sends the number plus one.
    training._request_id_counter = training._turn_counter = next_seq_id - 1
    # Each sampler of unsaved weights needs a number that no earlier client of this model has used;
    # each has used up a number of the model's order, so these numbers are unused.
    holder._sampling_client_counter = _FIRST_SAMPLER + next_seq_id
    return training
