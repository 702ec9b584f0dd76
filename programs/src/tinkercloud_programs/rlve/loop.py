"""The training loop: sample groups, verify them, train, save, report.

One report to the server contains both a checkpoint and its state. After any interruption, the
program resumes from the latest report: in the same model if it exists, otherwise in a new model
that is created from the checkpoint.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import asdict
from statistics import fmean
from typing import Any

import tinker
from tinker import types

from tinkercloud_programs.attach import attach
from tinkercloud_programs.rlve.batches import Group, Response, data_of
from tinkercloud_programs.rlve.difficulty import Difficulty
from tinkercloud_programs.rlve.problems import Problem, Problems
from tinkercloud_programs.rlve.prompts import prompt_tokens
from tinkercloud_programs.server import ModelGone, ProgramServer
from tinkercloud_protocol.programs import program_messages as names
from tinkercloud_protocol.programs.program_messages import EnvironmentProgress, ProgramProgress
from tinkercloud_protocol.programs.rlve import RlveConfig

_TTL_SECONDS = 7 * 24 * 3600
"""Lifetime of the checkpoints to sample from; the last one is kept."""


class Trainer:
    """Trains one model on the configured environments."""

    def __init__(self, config: RlveConfig, server: ProgramServer) -> None:
        self._config = config
        self._server = server
        self._service = tinker.ServiceClient()
        self._problems = Problems(config)
        self._difficulties = {
            name: Difficulty(config.initial_difficulty) for name in config.environment_list
        }
        self._step = 0
        self._owns_model = False
        """Whether the model was created in this program's own session."""
        self._saved: list[str] = []
        """Checkpoints of this program, oldest first."""
        self._training, self._attempt = self._resume()
        self._tokenizer = self._training.get_tokenizer()

    def _resume(self) -> tuple[tinker.TrainingClient, int]:
        """Return a client of the model at its last checkpoint, and a number of this attempt."""
        record = self._server.record()
        last = record.progress
        if last.state is not None:
            self._restore(last.state)
        model_id = last.model_id or os.environ[names.MODEL_ID]
        print(f"attaching to model {model_id}, once its session head is ready")
        try:
            next_seq_id = self._server.attach(model_id)
        except ModelGone as error:
            if last.checkpoint is None:
                raise
            print(f"{error}; continuing in a new model from {last.checkpoint}")
            return self._recreate(last.checkpoint), 1
        training = attach(self._service, model_id, next_seq_id)
        if last.checkpoint is not None:
            training.load_state_with_optimizer(last.checkpoint).result()
            print(f"resumed model {model_id} from {last.checkpoint}")
        else:
            print(f"attached to model {model_id} at request {next_seq_id}")
        self._server.report(ProgramProgress(model_id=model_id))
        return training, next_seq_id

    def _recreate(self, checkpoint: str) -> tinker.TrainingClient:
        created = self._service.create_training_client_from_state_with_optimizer(checkpoint)
        training = created.result()
        self._owns_model = True
        self._server.report(ProgramProgress(model_id=str(training.model_id)))
        return training

    def _restore(self, state: dict[str, Any]) -> None:
        self._step = int(state["step"])
        self._saved = list(state["saved"])
        for name, fields in state["difficulties"].items():
            if name in self._difficulties:
                self._difficulties[name] = Difficulty(**fields)

    def run(self) -> None:
        """Train until the configured number of steps is reached."""
        config = self._config
        while self._step < config.num_rollout:
            groups = self._sample_step()
            metrics = self._train(groups)
            self._step += 1
            self._report(groups, metrics)
            is_last = self._step == config.num_rollout
            if is_last or self._step % config.save_every_steps == 0:
                self._save()
        if not self._owns_model:
            # The end of a session deletes the models that were created in it.
            self._service.close("success").result()

    def _sample_step(self) -> list[Group]:
        """Sample prompts until enough have responses with different rewards."""
        config = self._config
        # A resumed program repeats the problems of the steps that it repeats.
        chance = random.Random(f"{config.seed}:{self._step}")  # noqa: S311 - not for secrets
        sampler = self._training.save_weights_and_get_sampling_client().result()
        groups: list[Group] = []
        number = 0
        while number < config.over_sampling_batch_size:
            wanted = config.rollout_batch_size - sum(self._is_useful(group) for group in groups)
            if wanted <= 0:
                break
            count = min(wanted, config.over_sampling_batch_size - number)
            groups += self._sample(sampler, [self._problem(chance) for _ in range(count)], chance)
            number += count
        for group in groups:
            name, difficulty = group.problem.environment, group.problem.difficulty
            self._difficulties[name].record(difficulty, group.accuracy, config)
        return groups

    def _is_useful(self, group: Group) -> bool:
        return not (self._config.use_dynamic_sampling_filter and group.is_uniform)

    def _problem(self, chance: random.Random) -> Problem:
        name = chance.choice(self._config.environment_list)
        difficulty = self._difficulties[name].choose(self._config, chance)
        return self._problems.generate(name, difficulty, chance)

    def _sample(
        self, sampler: tinker.SamplingClient, problems: list[Problem], chance: random.Random
    ) -> Iterator[Group]:
        config = self._config
        prompts = [prompt_tokens(self._tokenizer, each.text, config) for each in problems]
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(prompt),
                config.n_samples_per_prompt,
                types.SamplingParams(
                    max_tokens=config.rollout_max_response_len,
                    temperature=config.rollout_temperature,
                    seed=chance.randrange(2**31),
                ),
            )
            for prompt in prompts
        ]
        for problem, prompt, future in zip(problems, prompts, futures, strict=True):
            responses = [
                Response(
                    sequence.tokens,
                    sequence.logprobs or [],
                    problem.verify(str(self._tokenizer.decode(sequence.tokens))),
                )
                for sequence in future.result().sequences
            ]
            yield Group(problem, prompt, responses)

    def _train(self, groups: list[Group]) -> dict[str, float]:
        data = data_of(groups)
        if not data:
            return {"datums": 0.0}
        gradient = self._training.forward_backward(data, "importance_sampling")
        applied = self._training.optim_step(
            types.AdamParams(learning_rate=self._config.learning_rate)
        )
        metrics = dict(gradient.result().metrics)
        metrics.update(applied.result().metrics or {})
        return {name[:256]: float(value) for name, value in metrics.items()} | {
            "datums": float(len(data))
        }

    def _report(self, groups: list[Group], metrics: dict[str, float]) -> None:
        reward = fmean(reward for group in groups for reward in group.rewards)
        accuracy = fmean(group.accuracy for group in groups)
        highest = ", ".join(f"{name} {each.highest}" for name, each in self._difficulties.items())
        print(
            f"step {self._step}: reward {reward:.3f}, accuracy {accuracy:.3f}, difficulty {highest}"
        )
        self._server.report(
            ProgramProgress(
                step=self._step,
                total_steps=self._config.num_rollout,
                reward=reward,
                environments={
                    name: EnvironmentProgress(
                        difficulty=each.highest, metric=each.metric, prompts=each.total_prompts
                    )
                    for name, each in self._difficulties.items()
                },
                metrics={"accuracy": accuracy, **metrics},
            )
        )

    def _save(self) -> None:
        """Save a checkpoint, make it the place to resume from, and delete the ones before it."""
        # Steps may be repeated, by another attempt.
        name = f"rlve-{self._step:06d}-{self._attempt}"
        saving = self._training.save_state(name, overwrite=True)
        publishing = self._training.save_weights_for_sampler(name, ttl_seconds=_TTL_SECONDS)
        checkpoint, sampler = saving.result().path, publishing.result().path
        earlier = self._saved
        self._saved = [*earlier, checkpoint]
        state = {
            "step": self._step,
            "saved": [checkpoint],
            "difficulties": {name: asdict(each) for name, each in self._difficulties.items()},
        }
        self._server.report(ProgramProgress(checkpoint=checkpoint, sampler=sampler, state=state))
        rest = tinker.RestClient()
        for path in earlier:
            try:
                rest.delete_checkpoint_from_tinker_path(path).result()
            except tinker.NotFoundError:
                print(f"checkpoint {path} was deleted already")
        self._saved = [checkpoint]
