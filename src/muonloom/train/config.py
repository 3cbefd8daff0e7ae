"""What a training run is: the TOML file as frozen data, checked on entry, key by key."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from muonloom.errors import complaint


def _size(value: object) -> int | str:
    if value == "auto" or (type(value) is int and value > 0):
        return value
    raise ValueError(f'got {value!r}; wanted "auto" or a positive number of bytes')


Size = Annotated[int | str, PlainValidator(_size)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Rate = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0.0, le=1e7)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RunConfig(_Section):
    """`[run]`: where the results go, what is drawn at random, and on which machine."""

    name: Name = "train"
    directory: Name = "runs"
    seed: Natural = 0
    device: Name = "auto"
    threads: Natural = 0
    tensorboard: bool = True
    save_model: bool = True
    proofs: bool = True


class ModelConfig(_Section):
    """`[model]`: a description to build from scratch (`config`), or a directory with weights."""

    config: dict[str, Any] | str | None = None
    directory: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    autocast: bool = False
    attention: str | None = None
    experts: str | None = None
    expert_weights: Literal["parameter", "float8_block"] = "parameter"

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.config is None) == (self.directory is None):
            raise ValueError("give `config` or `directory`, and not both")
        return self


class DataConfig(_Section):
    """`[data]`: the text, how it is read and cut, and what of it is held out."""

    source: Literal["standard-library", "files"] = "standard-library"
    files: list[str] = []
    eval_files: list[str] = []
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    field: Name = "text"
    eval_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    tokenizer: Name = "bytes"
    sequence_length: Annotated[int, Field(ge=2)] = 128

    @model_validator(mode="after")
    def _files_are_named(self) -> Self:
        if self.source == "files" and not self.files:
            raise ValueError('`source = "files"` needs `files`, a list of paths or globs')
        if self.source != "files" and (self.files or self.eval_files):
            raise ValueError('`files` and `eval_files` need `source = "files"`')
        return self


class HostConfig(_Section):
    """`[optim.host]`: the fields of `muonloom.HostPlacement`, for ``placement = "host"``."""

    slot_bytes: Size = "auto"
    num_slots: Count = 3
    master_layout: Literal["full", "split"] = "full"


class OptimConfig(_Section):
    """`[optim]`: the options of `muonloom.Muon` and of its layout, under the same names.

    ``algorithm = "adamw"`` gives every parameter to AdamW, at `adamw_lr` (or else `lr`).
    """

    algorithm: Literal["muon", "adamw"] = "muon"
    lr: Rate = 1e-3
    weight_decay: Rate = 0.1
    momentum: Decay = 0.95
    nesterov: bool = True
    ns_steps: Count = 5
    ns_coefficients: str | tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_method: Literal["auto", "standard", "gram"] = "auto"
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral", "none"] | None = None
    adamw_lr: Rate | None = None
    adamw_betas: tuple[Decay, Decay] = (0.9, 0.95)
    adamw_eps: Rate = 1e-8
    adamw_weight_decay: Rate | None = None
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    ns_batch_bytes: Size = "auto"
    no_decay: list[str] = ["*norm*", "*bias"]
    heads_per_block: Count | None = None
    mla_components: bool = False
    cut_output: bool = False
    overrides: dict[str, Literal["muon", "adamw"]] = {}
    idle_matrices: Literal["update", "skip"] = "update"
    skip_nonfinite: bool = True
    max_consecutive_skips: Natural = 20
    free_gradients: bool = False
    placement: Literal["device", "host"] = "device"
    host: HostConfig = HostConfig()

    @model_validator(mode="after")
    def _host_is_read(self) -> Self:
        if self.placement == "device" and "host" in self.model_fields_set:
            raise ValueError(
                complaint(
                    "optim.host",
                    got='a table that placement = "device" does not read',
                    wanted='`placement = "host"` in [optim]',
                    remedy="Set it, or remove [optim.host].",
                )
            )
        return self


class ScheduleConfig(_Section):
    """`[schedule]`: how long, how much a step, and the learning rate's way through it."""

    steps: Count = 500
    batch_size: Count = 8
    accumulate: Count = 1
    clip_norm: Rate = 1.0
    warmup_steps: Natural = 0
    decay: Literal["linear", "cosine", "none"] = "linear"
    decay_fraction: Fraction = 1.0
    final_fraction: Fraction = 0.0


class EvalConfig(_Section):
    """`[eval]`: how often and on how many held-out sequences; the sample that is shown."""

    every: Natural = 100
    sequences: Count = 128
    final_sequences: Count = 1024
    prompt_tokens: Count = 64
    sample_tokens: Natural = 160
    temperature: Rate = 0.0


class CheckpointConfig(_Section):
    """`[checkpoint]`: how often the run is saved, and whether it goes on from what was saved."""

    every: Natural = 100
    keep_last: Count = 2
    asynchronous: bool = True
    extra_host_bytes: Size = "auto"
    resume: bool = True
    verify: Literal["full", "manifest"] = "full"


class ParallelConfig(_Section):
    """`[parallel]`: how the ranks that torchrun starts share the run's work.

    ``mode = "auto"`` is ``"replicated"`` on several ranks, ``"none"`` in one process.
    """

    mode: Literal["auto", "none", "replicated", "fsdp2", "hsdp"] = "auto"
    replicas: Count | None = None
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    timeout_s: Seconds = 600.0

    @model_validator(mode="after")
    def _keys_are_read(self) -> Self:
        if self.mode == "hsdp" and self.replicas is None:
            raise ValueError(
                complaint(
                    "parallel.replicas",
                    got="nothing",
                    wanted='how many copies of the model mode = "hsdp" keeps',
                    remedy="Each is spread over (number of ranks) / replicas ranks.",
                )
            )
        readers = {"replicas": ("hsdp",), "reduce_dtype": ("fsdp2", "hsdp")}
        for key, modes in readers.items():
            if key in self.model_fields_set and self.mode not in modes:
                raise ValueError(
                    complaint(
                        f"parallel.{key}",
                        got=f'a value that mode = "{self.mode}" does not read',
                        wanted=f"mode = {' or '.join(json.dumps(mode) for mode in modes)}",
                        remedy="Set it, or remove the key.",
                    )
                )
        return self


class TrainConfig(_Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.schedule.warmup_steps >= self.schedule.steps:
            raise ValueError(
                f"schedule.warmup_steps: got {self.schedule.warmup_steps}; wanted fewer than "
                f"schedule.steps ({self.schedule.steps})"
            )
        return self
