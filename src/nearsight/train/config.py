"""What a run is made of: typed sections, filled from a YAML recipe and `key=value` overrides; all faults told at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nearsight.errors import UserError, nearest

__all__ = [
    "CheckpointConfig",
    "EmaConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrainConfig",
    "given",
    "known_keys",
    "merge",
    "nearest",
    "parse_override",
    "read_yaml",
    "to_yaml",
    "validate",
]


class Section(BaseModel):
    """A group of keys; an unknown one is a fault, never ignored."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


class ModelConfig(Section):
    name: str = Field(description="a model registered in timm (nearsight's are)")
    pretrained: bool = Field(default=False, description="start from timm's published weights")
    options: dict[str, Any] = Field(
        default_factory=dict, description="further keywords of the model; null: its own default"
    )
    drop: float = Field(default=0.0, ge=0, lt=1, description="dropout before the classifier")
    drop_path: float | None = Field(
        default=None, ge=0, lt=1, description="stochastic depth; null: the model's own default"
    )
    bn_decay: float | None = Field(
        None, ge=0, lt=1, description="kept share of BatchNorm's running statistics per step"
    )
    sync_bn: bool = Field(default=False, description="BatchNorm statistics over all processes")
    channels_last: bool = False
    compile: bool | Literal["blocks"] = Field(
        default=False, description="torch.compile; blocks: each kind of repeated block once, in less time"
    )
    compile_options: dict[str, Any] = Field(
        default_factory=dict, description="options of torch.compile; those that this torch lacks are left out"
    )
    compile_processes: int | None = Field(
        default=None,
        ge=0,
        description="processes that compile blocks ahead, side by side; 0: none; null: on a GPU, where there are cores",
    )
    cuda_graphs: bool = Field(
        default=False, description="replay the compiled network as CUDA graphs: the host's launches cost nothing"
    )
    grad_checkpointing: bool = Field(default=False, description="recompute activations in the backward pass")


class OptimizerConfig(Section):
    name: str = Field(default="sgd", description="a timm optimiser: sgd (Nesterov), momentum, adamw, lamb, …")
    lr: float = Field(default=0.1, gt=0)
    base_batch: int | None = Field(
        default=None, ge=1, description="lr is meant for this batch; scaled linearly to the run's"
    )
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    decay_1d: bool = Field(default=False, description="weight decay also on biases and norms")
    layer_decay: float | None = Field(default=None, gt=0, le=1)
    lr_scale: dict[str, float | None] = Field(
        default_factory=dict,
        description="factors on lr by parameter name, with * for anything: {'backbone.*': 0.1}; null: none",
    )
    decay_scale: dict[str, float | None] = Field(
        default_factory=dict, description="factors on weight_decay by parameter name: {'*.qkv.weight': 0}; null: none"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="further keywords of the optimiser; null: none such"
    )


class ScheduleConfig(Section):
    name: Literal["cosine", "restarts", "step", "constant"] = "cosine"
    epochs: int = Field(default=10, ge=1)
    warmup_epochs: float = Field(default=0.0, ge=0)
    warmup_lr: float = Field(default=0.0, ge=0, description="where the warm-up starts")
    min_lr: float = Field(default=0.0, ge=0)
    restarts: list[int] = Field(default_factory=list, description="epochs at which the cosine starts anew")
    tail_lr: float | None = Field(default=None, gt=0, description="constant lr from the last restart on")
    milestones: list[int] = Field(default_factory=list, description="epochs at which 'step' multiplies lr by `gamma`")
    gamma: float = Field(default=0.1, gt=0, lt=1)


class EmaConfig(Section):
    decay: float | None = Field(default=None, gt=0, lt=1, description="null: no moving average")
    warmup: bool = Field(default=False, description="let the decay grow from 0")
    buffers: bool = Field(default=True, description="average buffers too; false copies them")


class TrainConfig(Section):
    seed: int = Field(default=0, ge=0, lt=2**31)
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    accumulate: int = Field(default=1, ge=1, description="micro-batches per step")
    clip: float | None = Field(default=None, gt=0, description="largest gradient norm")
    deterministic: bool = Field(default=False, description="same bits on every run, where the device can")
    max_steps: int | None = Field(default=None, ge=1, description="stop after so many steps, whatever the epochs say")
    bad_steps: int = Field(default=0, ge=0, description="how many steps with a non-finite loss to skip before stopping")
    device: Literal["auto", "cpu"] = "auto"
    eval_every: int = Field(
        default=1, ge=1, description="epochs between evaluations; the last epoch is always evaluated"
    )


class CheckpointConfig(Section):
    every_epochs: int = Field(default=1, ge=1)
    every_steps: int | None = Field(default=None, ge=1, description="also every so many steps")
    keep: int = Field(default=2, ge=1, description="latest ones kept, besides the best")


class LogConfig(Section):
    every: int = Field(default=20, ge=1, description="steps between lines in log.jsonl")
    tensorboard: bool = True


class RunConfig(Section):
    """What every task shares; a task adds its own sections (`data`, `loss`, …)."""

    task: str = "classify"
    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    ema: EmaConfig = EmaConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    def faults(self) -> list[str]:
        """What is wrong between keys, each 'key: got …, wanted …'."""
        found = []
        schedule = self.schedule
        if schedule.warmup_epochs > schedule.epochs:
            found.append(
                f"schedule.warmup_epochs: got {schedule.warmup_epochs:g}, wanted at most schedule.epochs={schedule.epochs}"
            )
        if schedule.name == "restarts":
            if not schedule.restarts:
                found.append("schedule.restarts: got none, wanted the epochs of schedule.name=restarts")
            elif sorted(set(schedule.restarts)) != schedule.restarts or schedule.restarts[0] <= schedule.warmup_epochs:
                found.append(
                    f"schedule.restarts: got {schedule.restarts}, wanted growing epochs after the warm-up of "
                    f"{schedule.warmup_epochs:g}"
                )
        if schedule.name == "step" and (not schedule.milestones or sorted(schedule.milestones) != schedule.milestones):
            got = schedule.milestones or "none"
            found.append(f"schedule.milestones: got {got}, wanted the epochs of schedule.name=step, growing")
        # Another schedule would leave them out without a word.
        for key, name in (("restarts", "restarts"), ("tail_lr", "restarts"), ("milestones", "step")):
            if schedule.name != name and getattr(schedule, key):
                found.append(f"schedule.{key}: got it with schedule.name={schedule.name}, wanted schedule.name={name}")
        if schedule.name in ("step", "constant") and schedule.min_lr:
            found.append(
                f"schedule.min_lr: got it with schedule.name={schedule.name}, wanted schedule.name=cosine or restarts"
            )
        if self.model.cuda_graphs and not self.model.compile:
            found.append("model.cuda_graphs: got true, wanted model.compile=true with it")
        if self.model.compile_processes and self.model.compile != "blocks":
            number = self.model.compile_processes
            found.append(f"model.compile_processes: got {number}, wanted model.compile=blocks with it")
        if self.model.cuda_graphs and self.train.accumulate > 1:
            # A replay writes its gradients where the last one did.
            found.append(f"train.accumulate: got {self.train.accumulate} with model.cuda_graphs, wanted 1")
        return found


Config = TypeVar("Config", bound=RunConfig)


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-3 is a number; a key that is there twice is a mistake, and so is {key:1} for {key: 1}."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            seen.add(str(key.value))
            if ":" in key.value and key.style is None and value.value == "":
                text = f"{key.value!r} has no value, wanted a space after its colon"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def read_yaml(text: str, name: str) -> dict[str, Any]:
    """The mapping a YAML text holds, or a sentence.

    >>> read_yaml("optimizer: {lr: 1e-3}", "x")
    {'optimizer': {'lr': 0.001}}
    """
    try:
        data = yaml.load(text, Loader=_Loader)  # a SafeLoader: plain values only
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where is not None else ""
        raise UserError(f"{name}: not valid YAML{line}: {getattr(error, 'problem', None) or error}.") from error
    if not isinstance(data, dict):
        raise UserError(f"{name}: got {type(data).__name__}, wanted keys such as 'model:' and 'data:'.")
    return data


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=value` as nested mappings; the value is read as YAML.

    >>> parse_override("optimizer.lr=1e-3")
    {'optimizer': {'lr': 0.001}}
    """
    key, mark, value = text.partition("=")
    parts = key.strip().split(".")
    if not mark or not all(parts):
        raise UserError(f"got {text!r}, wanted KEY=VALUE, for example optimizer.lr=0.1.")
    try:
        nested: Any = yaml.load(value, Loader=_Loader)
    except yaml.constructor.ConstructorError as error:
        raise UserError(f"{key.strip()}: {error.problem}; got {value}.") from error
    except yaml.YAMLError:
        nested = value
    for part in reversed(parts):
        nested = {part: nested}
    return dict(nested)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over` on top, section by section.

    >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    """
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not null, which takes back what another recipe set.

    >>> given({"stem": None, "stages": "aaaa"})
    {'stages': 'aaaa'}
    """
    return {key: value for key, value in options.items() if value is not None}


def known_keys(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a config class, with its field.

    >>> "optimizer.lr" in known_keys(RunConfig)
    True
    """
    keys: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        keys[prefix + name] = field
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys.update(known_keys(inner, f"{prefix}{name}."))
    return keys


def validate(cls: type[Config], data: Mapping[str, Any], name: str, known: Collection[str] | None = ()) -> Config:
    """A typed config, or one sentence that names every fault.

    Faults between keys that are `known` already are let be; None: all of them, of what was trained with them.
    """
    try:
        config = cls.model_validate(dict(data))
    except ValidationError as error:
        _refuse(name, _faults(error.errors(), cls))
    faults = [] if known is None else [fault for fault in config.faults() if fault not in known]
    if faults:
        _refuse(name, faults)
    return config


def _refuse(name: str, faults: Sequence[str]) -> Any:
    if len(faults) == 1:
        raise UserError(f"{name}: {faults[0]}.")
    listed = "; ".join(f"({number}) {fault}" for number, fault in enumerate(faults, 1))
    raise UserError(f"{name}: {len(faults)} faults: {listed}.")


def _faults(items: Sequence[Any], cls: type[BaseModel]) -> list[str]:
    """A sentence for each key: of one that may be of several kinds, each kind has its own fault."""
    known = known_keys(cls)
    faults: dict[str, str] = {}
    for item in items:
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            # A right name in the wrong section is nearer than a similar word.
            moved = next((k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]), None)
            near = moved or nearest(key, list(known))
            faults[key] = f"unknown key {key}" + (f" (the nearest is {near})" if near else "")
        elif item["type"] == "missing":
            faults[key] = f"{key}: missing"
        else:
            whole, _, kind = key.rpartition(".")
            key = whole if whole in known and re.match(r"(bool|int|float|str)$|literal\[", kind) else key
            text = item["msg"][0].lower() + item["msg"][1:]
            text = text.replace("input should be", "wanted").removesuffix(", unable to interpret input")
            if key in faults:
                faults[key] += f" or {text.removeprefix('wanted ')}"
            else:
                faults[key] = f"{key}: got {item['input']!r}, {text}"
    return list(faults.values())


def to_yaml(config: BaseModel) -> str:
    """The whole config as YAML, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
