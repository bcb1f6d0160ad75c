"""Configs: typed, all faults told at once, unknown keys met with the nearest known one."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from nearsight.errors import UserError
from nearsight.train.config import OptimizerConfig, given, parse_override, read_yaml, to_yaml
from nearsight.train.schedule import build_optimizer, build_schedule, learning_rates, scaled_lr
from nearsight.train.tasks import config_from, load_config
from nearsight.train.tasks.classify import create_network
from tests.train.support import SMALL, small


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimizer.lrr=1", "unknown key optimizer.lrr (the nearest is optimizer.lr)"),
        ("optimiser.lr=1", "unknown key optimiser (the nearest is optimizer)"),
        ("data.weight_decay=1", "unknown key data.weight_decay (the nearest is optimizer.weight_decay)"),
        ("model.lr=1", "unknown key model.lr (the nearest is optimizer.lr)"),  # not model.drop, which looks more alike
        ("optimizer.lr=fast", "optimizer.lr: got 'fast', wanted a valid number"),
        ("optimizer.lr=0", "optimizer.lr: got 0, wanted greater than 0"),
        ("optimizer.lr=.inf", "optimizer.lr: got inf, wanted a finite number"),
        ("data.mean=[.nan]", "data.mean.0: got nan, wanted a finite number"),
        ("schedule.name=cosin", "schedule.name: got 'cosin', wanted 'cosine', 'restarts', 'step' or 'constant'"),
        ("schedule.warmup_epochs=20", "schedule.warmup_epochs: got 20, wanted at most schedule.epochs=10"),
        ("schedule.name=restarts", "schedule.restarts: got none"),
        ("schedule.restarts=[3]", "schedule.restarts: got it with schedule.name=cosine, wanted schedule.name=restarts"),
        ("schedule.tail_lr=1e-4", "schedule.tail_lr: got it with schedule.name=cosine, wanted schedule.name=restarts"),
        ("schedule.milestones=[3]", "schedule.milestones: got it with schedule.name=cosine, wanted schedule.name=step"),
        (
            "schedule.name=constant schedule.min_lr=1e-5",
            "schedule.min_lr: got it with schedule.name=constant, wanted schedule.name=cosine or restarts",
        ),
        (
            "data.augment.scale=[0.5,1]",
            "data.augment.scale: got it with data.augment.crop=pad, wanted data.augment.crop=resized",
        ),
        (
            "schedule.name=restarts schedule.restarts=[5,3]",
            "schedule.restarts: got [5, 3], wanted growing epochs after",
        ),
        (
            "schedule.name=restarts schedule.restarts=[1,3]",
            "schedule.restarts: got [1, 3], wanted growing epochs after",
        ),
        ("schedule.name=step", "schedule.milestones: got none, wanted the epochs of schedule.name=step"),
        ("schedule.name=step schedule.milestones=[3,1]", "schedule.milestones: got [3, 1], wanted the epochs of"),
        ("data.std=[0]", "data.std.0: got 0, wanted greater than 0"),
        ("data.augment.scale=[0.9,0.2]", "data.augment.scale: got 0.9 to 0.2, wanted the smaller first, above 0"),
        ("loss.mixup=0.2 data.batch_size=63", "data.batch_size: got 63 with mixing, wanted an even number"),
        ("model.compile=block", "model.compile: got 'block', wanted a valid boolean or 'blocks'."),
        ("model.cuda_graphs=true", "model.cuda_graphs: got true, wanted model.compile=true with it"),
        (
            "model.compile=true model.compile_processes=4",
            "model.compile_processes: got 4, wanted model.compile=blocks with it",
        ),
        ("model.compile_processes=-1", "model.compile_processes: got -1, wanted greater than or equal to 0"),
        (
            "model.cuda_graphs=true model.compile=true train.accumulate=2",
            "train.accumulate: got 2 with model.cuda_graphs, wanted 1",
        ),
        ("data.mean=[0.1,0.2]", "data.mean: got 2 numbers, wanted 1 (data.channels)"),
        (
            "data.on_device=true data.augment.auto=rand-m9",
            "data.on_device: got true with data.augment.auto, which runs in workers",
        ),
        ("task=clasify", "task: got 'clasify', wanted one of classify, detect, reconstruct. Did you mean 'classify'?"),
        ("task=[1]", "task: got [1], wanted one of classify, detect, reconstruct"),
        (
            "data.augment.auto=rand-q9",
            "data.augment.auto: got 'rand-q9', which timm does not read (Unknown RandAugment config section)",
        ),
        ("data.max_pixels=1000000000", "data.max_pixels: got 1000000000, wanted less than or equal to 178956970"),
        ("optimizer", "got 'optimizer', wanted KEY=VALUE"),
    ],
)
def test_a_fault_is_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        load_config("digits/conv_nano", override.split())
    assert "\n" not in str(caught.value)


def test_all_faults_are_gathered() -> None:
    with pytest.raises(UserError) as caught:
        load_config("digits/conv_nano", ["optimizer.lrr=1", "train.precision=fp8", "data.batch_size=0", "model.drop=2"])
    text = str(caught.value)
    assert text.startswith("digits/conv_nano: 4 faults: (1) ")
    for key in ("optimizer.lrr", "train.precision", "data.batch_size", "model.drop"):
        assert key in text


def test_overrides_are_yaml() -> None:
    config: Any = load_config(
        "digits/conv_nano",
        [
            *("optimizer.lr=1e-4", "data.augment.crop=resized", "data.augment.scale=[0.5,1]"),
            *("ema.decay=null", "model.options.stages=aacc"),
        ],
    )
    assert (config.optimizer.lr, config.data.augment.scale, config.ema.decay) == (1e-4, (0.5, 1.0), None)
    assert config.model.options == {"stages": "aacc"}
    assert parse_override("data.root=a=b") == {"data": {"root": "a=b"}}


def test_a_config_survives_yaml() -> None:
    config = small()
    assert config_from(read_yaml(to_yaml(config), "x"), "x") == config


def test_bad_yaml_names_the_line() -> None:
    with pytest.raises(UserError, match=r"x: not valid YAML in line 2"):
        read_yaml("a: 1\nb: [", "x")
    with pytest.raises(UserError, match="x: got list, wanted keys"):
        read_yaml("- a", "x")


def test_a_key_that_is_there_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"^x: not valid YAML in line 3: 'train' is there twice\.$"):
        read_yaml("train: {seed: 1}\ndata: {source: digits}\ntrain: {max_steps: 1}", "x")
    with pytest.raises(UserError, match=r"^optimizer\.options: 'beta' is there twice; got \{beta: 1, beta: 2\}\.$"):
        parse_override("optimizer.options={beta: 1, beta: 2}")


def test_a_colon_without_a_space_is_no_option_taken_back() -> None:
    """YAML reads {eps:1e-3} as a key 'eps:1e-3' without a value, and null takes an option back: nothing would happen."""
    with pytest.raises(
        UserError, match=r"^optimizer\.options: 'eps:1e-3' has no value, wanted a space after its colon"
    ):
        parse_override("optimizer.options={eps:1e-3}")
    assert parse_override('a={"eps":1, "b:c": 2, "d:e": null, f: }') == {
        "a": {"eps": 1, "b:c": 2, "d:e": None, "f": None}
    }


def test_an_optimisers_own_options() -> None:
    """They reach timm; null leaves one out, so that a recipe may name another optimiser than the one it extends."""
    model = torch.nn.Linear(4, 8)
    muon = build_optimizer(model, OptimizerConfig(name="nmuon", options={"fallback_lr_scale": 0.2}), 1)
    assert muon.param_groups[0]["fallback_lr_scale"] == 0.2
    sgd = build_optimizer(model, OptimizerConfig(name="sgd", options={"fallback_lr_scale": None}), 1)
    assert isinstance(sgd, torch.optim.SGD)
    with pytest.raises(UserError, match=r"sgd refuses \{'fallback_lr_scale': 0.2\}"):
        build_optimizer(model, OptimizerConfig(name="sgd", options={"fallback_lr_scale": 0.2}), 1)


def test_only_null_takes_an_option_back() -> None:
    assert given({"a": None, "b": 0, "c": False, "d": ""}) == {"b": 0, "c": False, "d": ""}


def test_dropout_and_stochastic_depth_reach_the_network() -> None:
    model: Any = create_network(small(model={"drop": 0.3, "drop_path": 0.2}).model, num_classes=2, in_chans=1)
    assert model.drop_rate == 0.3
    assert max(m.drop_prob for m in model.modules() if type(m).__name__ == "DropPath") == pytest.approx(0.2)


def test_bad_model_and_optimiser_names() -> None:
    config = small(model={"name": "sasa_resnet5O", "drop_path": None})
    with pytest.raises(
        UserError, match=r"model.name: timm has no model 'sasa_resnet5O'. Did you mean 'sasa_resnet\d+'"
    ):
        create_network(config.model, num_classes=2, in_chans=1)
    config = small(model={"name": "sasa_resnet_nano", "options": {"windw": 3}})
    with pytest.raises(UserError, match=r"model: sasa_resnet_nano cannot be built with .*windw"):
        create_network(config.model, num_classes=2, in_chans=1)
    config = small(model={"options": {"num_classes": 7}})
    with pytest.raises(
        UserError, match=r"^model\.options: got num_classes=7, wanted 2, as the data have it; leave it out"
    ):
        create_network(config.model, num_classes=2, in_chans=1)
    model = create_network(small().model, num_classes=2, in_chans=1)
    with pytest.raises(UserError, match=r"optimizer.name: got 'admw', wanted one of timm's, e.g. adamw"):
        build_optimizer(model, OptimizerConfig(name="admw"), 64)
    with pytest.raises(UserError, match=r"optimizer\.options: sgd refuses"):
        build_optimizer(model, OptimizerConfig(name="sgd", options={"nonsense": 1}), 64)


@pytest.mark.parametrize("options", [{"betas": [2, 0.9]}, {"eps": -1}, {"betas": 3}])
def test_values_an_optimiser_refuses(options: dict[str, Any]) -> None:
    model = create_network(small().model, num_classes=2, in_chans=1)
    with pytest.raises(UserError, match=r"optimizer\.options: adamw refuses \{"):
        build_optimizer(model, OptimizerConfig(name="adamw", options=options), 64)


def test_what_a_network_refuses_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(model={"options": {"act_layer": "nonsense"}}).model
    with pytest.raises(UserError, match=r"model: test_resnet cannot be built with \{.*\(KeyError: 'nonsense'\)\.$"):
        create_network(config, num_classes=2, in_chans=1)

    def unreachable(*args: Any, **keys: Any) -> None:
        raise FileNotFoundError("An error happened\nwhile trying to locate the file on the Hub")

    monkeypatch.setattr("timm.create_model", unreachable)
    config = small(model={"pretrained": True}).model
    with pytest.raises(UserError, match=r"'pretrained': True\} \(FileNotFoundError: An error happened while") as caught:
        create_network(config, num_classes=2, in_chans=1)
    assert "\n" not in str(caught.value)


def test_batchnorm_decay_is_the_share_kept() -> None:
    config = small(model={"bn_decay": 0.97})
    model = create_network(config.model, num_classes=2, in_chans=1)
    momenta = {m.momentum for m in model.modules() if "BatchNorm" in type(m).__name__}
    assert [round(m, 6) for m in momenta] == [0.03]


def test_learning_rate_scales_with_the_batch() -> None:
    assert scaled_lr(OptimizerConfig(lr=1.6, base_batch=4096), 1024) == pytest.approx(0.4)
    assert scaled_lr(OptimizerConfig(lr=1.6), 1024) == 1.6


def cosine(low: float, high: float, start: int, end: int) -> Any:
    return lambda t: low + (high - low) * (1 + math.cos(math.pi * (t - start) / (end - start))) / 2


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (
            {"epochs": 4, "warmup_epochs": 1.5, "warmup_lr": 0.02, "min_lr": 0.01},
            {15: lambda t: 0.02 + 0.18 * t / 15, 40: cosine(0.01, 0.2, 15, 40)},
        ),
        (
            {
                "name": "restarts",
                "epochs": 6,
                "warmup_epochs": 1,
                "warmup_lr": 0.02,
                "min_lr": 0.01,
                "restarts": [3, 5],
            },
            {
                10: lambda t: 0.02 + 0.18 * t / 10,
                30: cosine(0.01, 0.2, 10, 30),
                50: cosine(0.01, 0.2, 30, 50),
                60: cosine(0.01, 0.2, 50, 60),
            },
        ),
        (
            {"name": "restarts", "epochs": 4, "restarts": [2], "tail_lr": 0.003},
            {20: cosine(0.0, 0.2, 0, 20), 40: lambda t: 0.003},
        ),
        (
            {"name": "step", "epochs": 5, "warmup_epochs": 0.5, "milestones": [2, 3], "gamma": 0.3},
            {5: lambda t: 0.2 * t / 5, 20: lambda t: 0.2, 30: lambda t: 0.06, 50: lambda t: 0.018},
        ),
        ({"name": "constant", "epochs": 2}, {20: lambda t: 0.2}),
    ],
    ids=["cosine", "restarts", "tail", "step", "constant"],
)
def test_every_step_has_its_rate(keys: dict[str, Any], parts: dict[int, Any]) -> None:
    """Ten steps an epoch; up to which step (not with it) which formula holds."""
    total = max(parts)
    config = small(optimizer={"lr": 0.2}, schedule=keys, train={"max_steps": None})
    got = learning_rates(config, 64, 10, points=total)
    wanted = [next(rate(t) for end, rate in parts.items() if t < end) for t in range(total)]
    assert [step for step, _ in got] == list(range(total))
    assert [lr for _, lr in got] == pytest.approx(wanted)


def test_momentum_and_layer_decay_reach_the_optimiser() -> None:
    model = create_network(small().model, num_classes=2, in_chans=1)
    keys = {"momentum": 0.7, "layer_decay": 0.5, "lr_scale": {"fc.*": 3.0}}
    optimizer = build_optimizer(model, OptimizerConfig.model_validate(keys), 64)
    names = {id(p): n for n, p in model.named_parameters()}
    scales = {names[id(p)]: group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    assert {group["momentum"] for group in optimizer.param_groups} == {0.7}
    assert (scales["fc.weight"], scales["fc.bias"]) == (3.0, 3.0)
    assert scales["conv1.0.weight"] < scales["layer1.0.conv1.weight"] < scales["layer4.0.conv1.weight"] < 1.0
    assert all(math.log2(scale).is_integer() for name, scale in scales.items() if not name.startswith("fc."))


def test_weight_decay_reaches_biases_only_when_asked() -> None:
    model = create_network(small().model, num_classes=2, in_chans=1)
    shares = []
    for everything in (False, True):
        groups = build_optimizer(model, OptimizerConfig(weight_decay=0.1, decay_1d=everything), 64).param_groups
        shares.append({p.dim() for group in groups if group["weight_decay"] for p in group["params"]})
    assert 1 not in shares[0]
    assert 1 in shares[1]


def test_learning_rates_by_name_follow_the_schedule() -> None:
    config = small(optimizer={"lr": 0.2, "weight_decay": 0.1, "lr_scale": {"conv1*": 0.5, "*.bias": 10.0}})
    model = create_network(config.model, num_classes=2, in_chans=1)
    optimizer = build_optimizer(model, config.optimizer, 64)
    schedule = build_schedule(optimizer, config.schedule, steps_per_epoch=10)
    names = {id(p): n for n, p in model.named_parameters()}
    seen = []
    for step in (0, 5):
        schedule.step_update(step)
        rate = 0.2 * (1 + math.cos(math.pi * step / 10)) / 2
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = names[id(p)]
                seen.append(name)
                factor = (0.5 if name.startswith("conv1") else 1.0) * (10.0 if name.endswith(".bias") else 1.0)
                assert group["lr"] == pytest.approx(rate * factor), name
                assert (group["weight_decay"] > 0) == (p.dim() > 1)
    assert sorted(seen) == sorted([*names.values()] * 2)
    with pytest.raises(UserError, match=r"optimizer\.lr_scale: 'con1\*' matches no parameter; one is conv1"):
        build_optimizer(model, OptimizerConfig(lr_scale={"con1*": 2.0}), 64)
    with pytest.raises(UserError, match=r"optimizer\.lr_scale: 'fc' matches no parameter; one is fc\.\w+\.$"):
        build_optimizer(model, OptimizerConfig(lr_scale={"fc": 2.0}), 64)  # the whole name counts
    # A pattern that a recipe brought along and that this network has nothing for.
    (group, *others) = build_optimizer(model, OptimizerConfig(lr_scale={"con1*": None}), 64).param_groups
    assert "lr_scale" not in group
    assert not any("lr_scale" in other for other in others)


def test_weight_decay_by_name() -> None:
    model = create_network(small().model, num_classes=2, in_chans=1)
    keys = {"weight_decay": 0.1, "decay_scale": {"conv1*": 0.0, "fc.weight": 0.5}, "lr_scale": {"fc.*": 2.0}}
    optimizer = build_optimizer(model, OptimizerConfig.model_validate(keys), 64)
    names = {id(p): n for n, p in model.named_parameters()}
    seen = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            seen[names[id(p)]] = (group["weight_decay"], group.get("lr_scale", 1.0))
    assert sorted(seen) == sorted(names.values())
    for name, (decay, scale) in seen.items():
        base = 0.1 if model.get_parameter(name).dim() > 1 else 0.0
        assert decay == pytest.approx(base * (0.0 if name.startswith("conv1") else 0.5 if name == "fc.weight" else 1.0))
        assert scale == (2.0 if name.startswith("fc.") else 1.0)
    with pytest.raises(UserError, match=r"optimizer\.decay_scale: 'cnv1\*' matches no parameter"):
        build_optimizer(model, OptimizerConfig(decay_scale={"cnv1*": 0.0}), 64)
    biases: dict[str, Any] = {"decay_scale": {"*.bias": 3.0}, "weight_decay": 0.1}
    with pytest.raises(
        UserError, match=r"'\*\.bias' matches only parameters without weight decay, .* at 0; leave it out"
    ):
        build_optimizer(model, OptimizerConfig(**biases), 64)
    assert build_optimizer(model, OptimizerConfig(**biases, decay_1d=True), 64)
    assert build_optimizer(
        model, OptimizerConfig(decay_scale={"fc.*": 3.0}), 64
    )  # a recipe's, with the decay switched off


def test_the_small_config_is_valid() -> None:
    assert small().model.name == SMALL["model"]["name"]
