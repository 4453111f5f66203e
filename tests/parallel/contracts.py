"""What engines and sharded optimizers promise beyond parity: checks that run on every rank of one process group."""

import copy
import re
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from groundup.bench.parallel import Setting, at_context, measure_step
from groundup.config import ModelConfig, ParallelConfig, size
from groundup.model import TransformerLM, count_parameters
from groundup.optim import AdamW, Muon
from groundup.parallel import fsdp, zero
from groundup.parallel.agree import DisagreementError, check_agreement
from groundup.parallel.ddp import BucketedDDP, DataParallel, FlatDDP, NaiveDDP, OverlapDDP, on_wire
from groundup.parallel.engine import materialiser, parallelize, units
from groundup.parallel.flat import Layout, Line
from groundup.parallel.fsdp import FSDP
from groundup.parallel.torch_engines import TorchDDP, TorchFSDP2, whole
from groundup.parallel.whole import WholeParameterOptimizer
from groundup.parallel.zero import ShardedDDP, ShardedOptimizer

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def shapes_net(seed: int = 0) -> nn.Module:
    """Parameters of awkward sizes, some smaller than the number of ranks."""
    torch.manual_seed(seed)
    net = nn.Module()
    for index, shape in enumerate([(7, 5), (1,), (3,), (11, 13), (2, 1, 3), (17,)]):
        net.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape)))
    return net


def give_gradients(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def line_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.ReLU(), nn.Linear(3, 2))


def raises(kind: type[BaseException], text: str, work: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        work()


# --- DDP ---------------------------------------------------------------------------------------------------------


@check
def a_second_backward_is_refused_where_it_would_be_wrong():
    x = torch.randn(4, 5)
    for kind in (OverlapDDP, BucketedDDP):
        model = kind(line_net())
        model(x).sum().backward()
        raises(RuntimeError, "no_sync", lambda model=model: model.module(x).sum().backward())
        model = kind(line_net())
        model(x).sum().backward()
        raises(RuntimeError, "before the next forward", lambda model=model: model(x))
    net = line_net()
    model = ShardedDDP(net, ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1))
    model(x).sum().backward()
    raises(RuntimeError, "no_sync", lambda: model.module(x).sum().backward())


@check
def naive_takes_two_backwards_and_reduces_their_sum():
    rank = dist.get_rank()
    x = torch.full((1, 5), float(rank + 1))
    model, net = NaiveDDP(line_net()), line_net()
    for _ in range(2):
        model(x).sum().backward()
    model.finish_gradient_synchronization()
    for other in range(dist.get_world_size()):
        (2 * net(torch.full((1, 5), float(other + 1))).sum() / dist.get_world_size()).backward()
    for p, q in zip(model.module.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@check
def finishing_inside_no_sync_is_refused():
    model = BucketedDDP(line_net())
    with model.no_sync():
        raises(RuntimeError, "outside no_sync", model.finish_gradient_synchronization)


@check
def gradients_stay_where_autograd_put_them():
    """No copy is made, whether they are kept between steps or dropped; a bucket has several parameters."""
    model = BucketedDDP(line_net(), 0.0002)
    x = torch.randn(4, 5)
    for kept in (False, True, True):
        places: dict[nn.Parameter, int] = {}
        handles = [
            p.register_post_accumulate_grad_hook(lambda p, places=places: places.update({p: p.grad.data_ptr()}))
            for p in model.params
        ]
        model(x).sum().backward()
        model.finish_gradient_synchronization()
        assert places == {p: p.grad.data_ptr() for p in model.params}
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=not kept)
    assert len(model.buckets) > 1
    assert any(len(bucket.params) > 1 for bucket in model.buckets)


@check
def a_parameter_that_is_not_contiguous_is_reduced():
    for kind in (NaiveDDP, OverlapDDP, BucketedDDP):
        net = nn.Linear(5, 3)
        net.weight = nn.Parameter(torch.ones(5, 3).t())
        model = kind(net)
        model(torch.full((1, 5), float(dist.get_rank()))).sum().backward()
        model.finish_gradient_synchronization()
        assert on_wire(net.weight.grad, None).is_contiguous()  # NCCL refuses any other, Gloo does not
        assert torch.equal(net.weight.grad, torch.full((3, 5), (dist.get_world_size() - 1) / 2))


@check
def buckets_follow_the_order_that_rank_zero_observed():
    class Backwards(nn.Module):
        """Runs its layers in another order than it defines them, and in another one on each rank."""

        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            order = [3, 0, 4, 1, 2] if dist.get_rank() == 0 else [0, 1, 2, 3, 4]
            for index in order:
                x = torch.tanh(self.parts[index](x))
            return x

    torch.manual_seed(0)
    model = OverlapDDP(Backwards())
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        model.finish_gradient_synchronization()
        model.zero_grad()
    number = {part.weight: index for index, part in enumerate(model.module.parts)}
    assert [number[bucket.params[0]] for bucket in model.buckets] == [2, 1, 4, 0, 3]


@check
def removed_hooks_leave_a_plain_module():
    for kind in (OverlapDDP, BucketedDDP):
        model = kind(line_net())
        model.remove_hooks()
        assert not any(p._post_accumulate_grad_hooks for p in model.module.parameters())
        (model.module(torch.ones(1, 5)).sum() * (dist.get_rank() + 1)).backward()
    net = line_net()
    before = [p.detach().clone() for p in net.parameters()]
    model = FSDP(net)
    model.remove_hooks()
    for p, q in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, q)
    net(torch.ones(1, 5)).sum().backward()


@check
def gradients_that_travel_in_bf16_come_back_rounded_but_right():
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))

    def zero1(net: nn.Module, **options: Any) -> ShardedDDP:
        return ShardedDDP(net, ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1), **options)

    def fsdp2(net: nn.Sequential, **options: Any) -> TorchFSDP2:
        return TorchFSDP2(net, [net[0]], **options)

    def gradients(make: Callable[..., DataParallel], **options: Any) -> list[Tensor]:
        """Whole, in the order of the parameters, as the optimizer gets them."""
        model = make(line_net(), **options)
        model(x).square().sum().backward()
        model.finish_gradient_synchronization()
        lines: Any = {FSDP: "units", ShardedDDP: "buckets"}.get(type(model))
        if lines is None:
            return [whole(p.grad) for p in model.params]
        found: list[Tensor] = []
        for line in getattr(model, lines):
            assert all(piece.grad.dtype == torch.float32 for piece in line.pieces)
            found += line.gather_pieces([piece.grad for piece in line.pieces], torch.float32, x.device)
        return found[::-1] if lines == "buckets" else found

    for average in (True, False):
        exact = gradients(BucketedDDP, average=average)
        for make in (NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP, zero1, FSDP, TorchDDP, fsdp2):
            found = gradients(make, reduce_dtype=torch.bfloat16, average=average)
            for grad, truth in zip(found, exact, strict=True):
                assert grad.dtype == torch.float32
                torch.testing.assert_close(grad, truth, rtol=2e-2, atol=2e-2)
            assert not all(map(torch.equal, found, exact)), make


@check
def disagreements_raise_on_every_rank_and_name_what_differs():
    rank = dist.get_rank()
    other = dist.get_world_size() - 1

    def net(change: str) -> nn.Module:
        net = line_net()
        if rank == other:
            if change == "shape":
                net[2] = nn.Linear(7, 4)
            elif change == "dtype":
                net[2].double()
            elif change == "requires_grad":
                net[2].weight.requires_grad_(False)
            elif change == "name":
                net.add_module("extra", nn.Linear(1, 1))
            elif change == "buffer":
                net.register_buffer("mask", torch.ones(3))
        return net

    words = {"shape": "(4, 7)", "dtype": "float64", "requires_grad": "frozen", "name": "extra.weight", "buffer": "mask"}
    for change, word in words.items():
        start = time.monotonic()
        with pytest.raises(DisagreementError, match=re.escape(word)) as caught:
            NaiveDDP(net(change))
        assert time.monotonic() - start < 10  # what is promised; a wait for somebody would take a minute
        assert f"rank {other}" in str(caught.value), str(caught.value)
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, str(caught.value))
        assert len(set(texts)) == 1, texts
    NaiveDDP(line_net())  # and equal modules still pass


@check
def a_rank_that_does_not_come_is_named():
    store = dist.distributed_c10d._get_default_store()
    wanted = ParallelConfig(optimizer="zero1", start_timeout=77.0)
    _, optimizer = parallelize(lm(), wanted, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.timeout == 77.0
    optimizer.timeout = 2.0
    group = {"params": line_net().parameters()}
    if dist.get_rank() == 0:
        raises(DisagreementError, "rank 1 did not come", lambda: check_agreement(line_net(), timeout=2.0))
        raises(DisagreementError, "parameters within 2 s", lambda: optimizer.add_param_group(group))
        store.set("rank 0 has given up", "1")
    else:
        store.wait(["rank 0 has given up"])
        check_agreement(line_net())
        optimizer.add_param_group(group)


@check
def ranks_of_several_groups_compare_call_by_call_of_each_group():
    """Rank 0 has compared once more than the others when all do."""
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        NaiveDDP(line_net(), group=group)
    NaiveDDP(line_net())


# --- sharded optimizers ------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "ours": (AdamW, {"lr": 0.1, "weight_decay": 0.1}),
}


def grouped(net: nn.Module) -> list[dict[str, Any]]:
    params = list(net.parameters())
    return [{"params": params[:3], "lr": 0.05}, {"params": params[3:5]}]


def equal_states(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for index, entry in b["state"].items():
        assert entry.keys() == a["state"][index].keys()
        for key, value in entry.items():
            found = a["state"][index][key]
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), (index, key)
            assert type(found) is type(value), (index, key)


@check
def a_sharded_optimizer_is_the_plain_one_bit_for_bit():
    """Groups with options of their own, a schedule, a group that joins later, a parameter without a gradient."""
    for name, (kind, options) in OPTIMIZERS.items():
        for wrap in (ShardedOptimizer, WholeParameterOptimizer):
            plain_net, net = shapes_net(), shapes_net()
            plain = kind(grouped(plain_net), **options)
            sharded = wrap(grouped(net), kind, **options)
            schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in (plain, sharded)]
            for step in range(5):
                for module, optimizer in ((plain_net, plain), (net, sharded)):
                    if step == 2:
                        optimizer.add_param_group({"params": list(module.parameters())[5:], "lr": 0.3})
                        # Only now, so that the schedule, which knows two groups, has moved both before.
                    give_gradients(module, step)
                    if step == 3:
                        module.p3.grad = None
                    optimizer.step()
                    optimizer.zero_grad()
                if step < 2:
                    for schedule in schedules:
                        schedule.step()
            for p, q in zip(net.parameters(), plain_net.parameters(), strict=True):
                assert torch.equal(p, q), (name, wrap)
            equal_states(sharded.state_dict(), plain.state_dict())


@check
def its_state_goes_to_and_from_the_plain_optimizer():
    for name, (kind, options) in OPTIMIZERS.items():
        for wrap in (ShardedOptimizer, WholeParameterOptimizer):
            plain_net, net = shapes_net(), shapes_net()
            plain, sharded = kind(grouped(plain_net), **options), wrap(grouped(net), kind, **options)
            give_gradients(plain_net, 0)
            plain.step()
            net.load_state_dict(plain_net.state_dict())
            saved = plain.state_dict()
            kept = copy.deepcopy(saved)
            sharded.load_state_dict(saved)
            equal_states(saved, kept)  # it is left as it was
            back_net = shapes_net()
            back_net.load_state_dict(plain_net.state_dict())
            back = kind(grouped(back_net), **options)
            back.load_state_dict(sharded.state_dict())
            for module, optimizer in ((plain_net, plain), (net, sharded), (back_net, back)):
                give_gradients(module, 1)
                optimizer.step()
            for p, q, r in zip(plain_net.parameters(), net.parameters(), back_net.parameters(), strict=True):
                assert torch.equal(p, q), (name, wrap)
                assert torch.equal(p, r), (name, wrap)


@check
def float32_state_of_bf16_parameters_is_loaded_uncut():
    for wrap in (ShardedOptimizer, WholeParameterOptimizer):
        plain_net, net = shapes_net().bfloat16(), shapes_net().bfloat16()
        plain = AdamW(grouped(plain_net), lr=0.1, master_weights=True)
        sharded = wrap(grouped(net), AdamW, lr=0.1, master_weights=True)
        give_gradients(plain_net, 0)
        plain.step()
        sharded.load_state_dict(plain.state_dict())
        found = sharded.state_dict()
        assert all(v.dtype == torch.float32 for e in found["state"].values() for v in e.values() if torch.is_tensor(v))
        assert "master" in found["state"][0]
        equal_states(found, plain.state_dict())


@check
def closures_and_keywords_work():
    net, plain_net = shapes_net(), shapes_net()
    sharded, plain = ShardedOptimizer(net.parameters(), AdamW, lr=0.1), AdamW(plain_net.parameters(), lr=0.1)

    def closure(module: nn.Module) -> Tensor:
        loss = sum(p.square().sum() for p in module.parameters())
        loss.backward()
        return loss

    assert torch.equal(sharded.step(lambda: closure(net)), plain.step(lambda: closure(plain_net)))
    for p, q in zip(net.parameters(), plain_net.parameters(), strict=True):
        assert torch.equal(p, q)


@check
def reductions_in_flight_are_bounded():
    """Each holds a whole bucket's or unit's gradients, the one that is being launched included."""
    reduce_scatter, most = Line.reduce_scatter, 0
    net, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), torch.ones(2, 4)
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=1e-5)
    sharded, engine = ShardedDDP(net, optimizer), FSDP(copy.deepcopy(net))

    def counted(self: Line, *args: Any) -> Any:
        nonlocal most
        flying = [line.scattering for line in optimizer.lines] + [unit._scattering for unit in engine.units]
        most = max(most, 1 + sum(work is not None for work in flying))
        return reduce_scatter(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Line, "reduce_scatter", counted)
        for model, limit in ((sharded, zero.IN_FLIGHT), (engine, fsdp.IN_FLIGHT)):
            most = 0
            model(x).sum().backward()
            model.finish_gradient_synchronization()
            assert most == limit, (type(model), most)


@check
def each_rank_holds_its_share_of_the_state():
    net, world = shapes_net(), dist.get_world_size()
    sharded = ShardedOptimizer(net.parameters(), torch.optim.AdamW)
    give_gradients(net, 0)
    sharded.step()
    held = sum(entry["exp_avg"].numel() for entry in sharded.inner.state.values())
    total = sum(p.numel() for p in net.parameters())
    shards: list[Any] = [None] * world
    dist.all_gather_object(shards, held)
    assert sum(shards) == total
    assert max(shards) <= -(-total // (8 * world)) * 8


@check
def an_optimizer_that_is_not_element_wise_is_refused():
    net = shapes_net()
    raises(ValueError, "WholeParameterOptimizer", lambda: ShardedOptimizer(net.parameters(), torch.optim.LBFGS, lr=1))


@check
def parameter_lists_that_differ_are_refused():
    shapes = [(2, 3)] if dist.get_rank() == 0 else [(3, 2)]
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    raises(DisagreementError, "(3, 2)", lambda: ShardedOptimizer(params, AdamW))
    for wrap in (ShardedOptimizer, WholeParameterOptimizer):
        net = line_net()
        before = [p.detach().clone() for p in net.parameters()]
        optimizer = wrap(net.parameters(), torch.optim.SGD, lr=0.5)
        with pytest.raises(DisagreementError, match=re.escape("(3, 2)")):
            optimizer.add_param_group({"params": params})
        give_gradients(net, 0)
        optimizer.step()  # and the optimizer is what it was
        for p, q in zip(net.parameters(), before, strict=True):
            assert torch.equal(p, q - 0.5 * p.grad)


@check
def a_group_that_joins_while_gradients_are_reduced_is_refused():
    net, x = line_net(), torch.ones(1, 5)
    params = list(net.parameters())
    optimizer = ShardedOptimizer(params[:4], torch.optim.SGD, lr=0.5)
    model = ShardedDDP(net, optimizer)
    model(x).sum().backward()
    optimizer.add_param_group({"params": params[4:]})
    raises(RuntimeError, "add_param_group() after finish", model.finish_gradient_synchronization)
    raises(RuntimeError, "add_param_group() after finish", lambda: model(x))


@check
def distributed_muon_is_muon():
    """19 matrices with odd sides and two vectors; each update is computed by one rank."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Module()
        for i in range(19):
            net.register_parameter(f"m{i}", nn.Parameter(torch.randn(3 + 2 * i, 41 - 2 * i)))
        net.register_parameter("gain", nn.Parameter(torch.ones(7)))
        net.register_parameter("bias", nn.Parameter(torch.ones(3)))
        return net

    def groups(net: nn.Module) -> list[dict[str, Any]]:
        params = list(net.parameters())
        return [{"params": params[:19], "muon": True}, {"params": params[19:], "muon": False, "weight_decay": 0.0}]

    plain_net, net_ = net(), net()
    plain = Muon(groups(plain_net), lr=0.02)
    sharded = WholeParameterOptimizer(groups(net_), Muon, lr=0.02)
    for step in range(3):
        for module, optimizer in ((plain_net, plain), (net_, sharded)):
            give_gradients(module, step)
            optimizer.step()
    for p, q in zip(net_.parameters(), plain_net.parameters(), strict=True):
        assert torch.equal(p, q)
    equal_states(sharded.state_dict(), plain.state_dict())
    assert max(sharded.load) < 1.1 * sum(sharded.load) / len(sharded.load), sharded.load
    assert sum(len(e) > 0 for e in sharded.inner.state.values()) < 21


# --- FSDP --------------------------------------------------------------------------------------------------------


def lm(device: str = "cpu", **options: Any) -> TransformerLM:
    config = ModelConfig(vocab_size=29, context_length=16, d_model=12, n_layers=4, n_heads=2, d_ff=17, **options)
    with torch.device(device):
        model = TransformerLM(config)
    model.init_weights(3)
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(29, (2, 16), generator=generator)
    return ids, ids.roll(-1, 1)


@check
def a_model_from_the_meta_device_gets_the_weights_of_one_process():
    for tied in (False, True):
        model = lm("meta", tie_embeddings=tied, qk_norm=True)
        engine = FSDP(model, units=units(model), materialise=materialiser(model, 3), device=torch.device("cpu"))
        truth = lm(tie_embeddings=tied, qk_norm=True).state_dict()
        found = dict(engine.full_parameters())
        assert found.keys() == truth.keys()
        for name, value in truth.items():
            assert torch.equal(found[name], value), name
        engine(*batch()).backward()
        engine.finish_gradient_synchronization()


@check
def at_most_the_prefetched_units_are_whole():
    for tied in (False, True):
        for prefetch in (0, 1, 2):
            model = lm(tie_embeddings=tied)
            engine = FSDP(model, units=units(model), prefetch=prefetch)
            most = 0

            def count(*_: Any, engine: FSDP = engine) -> None:
                nonlocal most
                whole = sum(unit.line.untyped_storage().nbytes() > 0 and not unit.keep for unit in engine.units)
                most = max(most, whole)

            for module in model.modules():
                module.register_forward_pre_hook(count)
                if isinstance(module, nn.Linear):
                    module.register_full_backward_hook(count)
            engine(*batch()).backward()
            engine.finish_gradient_synchronization()
            assert most <= 1 + prefetch, (prefetch, most)
            assert all(unit.line.untyped_storage().nbytes() == 0 for unit in engine.units)
            assert all(unit.shard.numel() < unit.line.numel() for unit in engine.units)


@check
def master_weights_and_gradients_stay_float32_under_bf16():
    model = lm()
    engine = FSDP(model, torch.bfloat16, units=units(model))
    engine(*batch()).backward()
    engine.finish_gradient_synchronization()
    for p in engine.parameters():
        assert p.dtype == torch.float32
        assert p.grad is not None
        assert p.grad.shape == p.shape
        assert p.grad.dtype == torch.float32
    assert engine.units[1].line.dtype == torch.bfloat16
    for p in engine.replicated:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, p.grad)
        assert all(torch.equal(g, everyone[0]) for g in everyone)


@check
def fsdp_with_activation_checkpointing_and_evaluation_between():
    def step(engine: FSDP) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.5)
        for _ in range(3):
            with torch.no_grad():
                engine.module(*batch())
            engine(*batch()).backward()
            engine.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
        return dict(engine.full_parameters())

    results = []
    for every in (0, 1, 2, 3):
        model = lm(checkpoint_activations=every)
        results.append(step(FSDP(model, units=units(model))))
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name


@check
def fsdp_keeps_frozen_weights_until_backward_has_read_them():
    def freeze(model: TransformerLM) -> TransformerLM:
        model.layers[1].requires_grad_(False)
        for name in ("w1", "w3"):
            model.layers[2].ffn.get_submodule(name).weight.requires_grad_(False)
        model.lm_head.weight.requires_grad_(False)
        return model

    model, net = freeze(lm()), freeze(lm())
    engine = FSDP(model, units=units(model))
    for _ in range(2):
        engine(*batch()).backward()
        engine.finish_gradient_synchronization()
    world = dist.get_world_size()
    for rank in range(world):
        ids = torch.randint(29, (2, 16), generator=torch.Generator().manual_seed(rank))
        (2 / world * net(ids, ids.roll(-1, 1))).backward()
    truth = {name: p.grad for name, p in net.named_parameters()}
    for unit in engine.units:
        for index, name in enumerate(unit.names):
            piece = unit.pieces[index]
            if truth[name] is None:
                assert piece.grad is None, name
            else:
                torch.testing.assert_close(piece.grad, unit.cut(index, truth[name]), rtol=1e-4, atol=1e-6)
        assert not unit.is_whole


@check
def fsdp_accumulates_where_a_rank_uses_no_sharded_layer():
    """Rank 0 alone uses the layers but in the last of three micro-batches, the first two in one `no_sync`."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gain, self.layers = nn.Parameter(torch.ones(4)), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor, use_layers: bool) -> Tensor:
            for layer in self.layers if use_layers else ():
                x = torch.tanh(layer(x))
            return x * self.gain

    def loss(model: nn.Module, rank: int, index: int) -> Tensor:
        return model(torch.full((1, 4), 1.0 + rank + index), rank == 0 or index == 2).sum()

    engine, net, rank, world = FSDP(Scaled(), average=False), Scaled(), dist.get_rank(), dist.get_world_size()
    with engine.no_sync():
        loss(engine, rank, 0).backward()
        loss(engine, rank, 1).backward()
    loss(engine, rank, 2).backward()
    engine.finish_gradient_synchronization()
    sum(loss(net, other, index) for other in range(world) for index in range(3)).backward()
    torch.testing.assert_close(engine.module.gain.grad, net.gain.grad)
    truth = dict(net.named_parameters())
    for unit in engine.units:
        for index, name in enumerate(unit.names):
            torch.testing.assert_close(unit.pieces[index].grad, unit.cut(index, truth[name].grad))


@check
def fsdp_loads_whole_weights_by_name():
    model = lm()
    engine = FSDP(model, units=units(model))
    truth = {name: torch.randn(tensor.shape) for name, tensor in lm().state_dict().items()}
    dist.broadcast_object_list(box := [truth], 0)
    engine.load_full_parameters(box[0].__getitem__)
    for name, value in engine.full_parameters():
        assert torch.equal(value, box[0][name]), name


@check
def fsdp_shards_layers_of_the_callers_own_classes():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(12.0).view(3, 4) / 10)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T

    net, x = nn.Sequential(Own(), nn.Linear(3, 2)), torch.ones(1, 4)
    truth = copy.deepcopy(net)
    engine = FSDP(net, layer_types=(Own,))
    assert [unit.names for unit in engine.units] == [["0.weight"]]
    assert engine.replicated == [net[1].weight, net[1].bias]
    engine(x).sum().backward()
    engine.finish_gradient_synchronization()
    truth(x).sum().backward()
    assert torch.equal(engine.units[0].pieces[0].grad, engine.units[0].cut(0, truth[0].weight.grad))
    assert torch.equal(net[1].weight.grad, truth[1].weight.grad)


@check
def fsdp_reduces_within_the_groups_timeout():
    """That of the whole world, or of the group that shares; a new group would have the backend's."""
    for group in (dist.group.WORLD, dist.new_group(timeout=timedelta(seconds=77))):
        reduces = FSDP(line_net(), group=group)._reduce_group
        told, found = (g._get_backend(torch.device("cpu")).options._timeout for g in (group, reduces))
        assert found == told < timedelta(minutes=10)


@check
def nothing_is_reduced_before_the_first_forward():
    engine = FSDP(lm())
    engine.finish_gradient_synchronization()
    assert all(p.grad is None for p in engine.params)
    engine(*batch()).backward()
    engine.finish_gradient_synchronization()
    assert all(p.grad is not None for p in engine.params)


@check
def bf16_shards_of_fsdp2_are_rounded_by_chance():
    """Every weight goes to one of the two bf16 numbers beside what a float32 step gives it."""
    net, wide = line_net().bfloat16(), line_net().bfloat16().float()
    x, options = torch.ones(2, 5), {"lr": 1e-3, "weight_decay": 0.1}
    engine = TorchFSDP2(net, [net[0]])
    optimizer = AdamW(net.parameters(), master_weights=False, **options)
    engine(x.bfloat16()).sum().backward()
    for p, q in zip(net.parameters(), wide.parameters(), strict=True):
        q.grad = p.grad.full_tensor().float()
    optimizer.step()
    AdamW(wide.parameters(), **options).step()
    for p, q in zip(net.parameters(), wide.parameters(), strict=True):
        assert p.dtype == optimizer.state[p]["exp_avg"].dtype == torch.bfloat16
        down = (q.detach().view(torch.int32) & -(1 << 16)).view(torch.float32)
        up = ((q.detach().view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32)
        found = p.full_tensor().float()
        assert ((found == down) | (found == up)).all()


@check
def two_dtypes_in_a_unit_are_refused():
    model = lm()
    model.layers[1].ffn.w1.double()
    raises(ValueError, "one dtype", lambda: FSDP(model, units=units(model)))


@check
def masked_tokens_that_differ_between_ranks_count_once():
    """Each rank's loss is divided by the global count: gradients sum to those of one process, bit for bit at W = 2."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ids = torch.randint(29, (world, 16), generator=torch.Generator().manual_seed(9))
    targets = ids.roll(-1, 1)
    for row in range(world):
        targets[row, : 3 * row] = -100
    count = float((targets != -100).sum())
    model, net = BucketedDDP(lm(), 0.001, average=False), lm()
    loss = model(ids[rank : rank + 1], targets[rank : rank + 1], n_valid=count)
    loss.backward()
    model.finish_gradient_synchronization()
    total = torch.zeros(())
    for row in range(world):
        one = net(ids[row : row + 1], targets[row : row + 1], n_valid=count)
        one.backward()
        total = total + one.detach()
    for p, q in zip(model.params, net.parameters(), strict=True):
        if world == 2:
            assert torch.equal(p.grad, q.grad)
        torch.testing.assert_close(p.grad, q.grad)
    mean = loss.detach()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean, net(ids, targets).detach())


@check
def layouts_cover_every_element_once():
    for world in (1, 2, 3, 5, 8):
        layout = Layout((torch.Size((3, 5)), torch.Size((1,)), torch.Size((70,)), torch.Size((0,))), world)
        for index, numel in enumerate(layout.numels):
            owned = [i for rank in range(world) for i in range(*layout.slices(rank)[index])]
            assert owned == list(range(numel))
        assert layout.total - sum(layout.numels) < 8 * world


@check
def memory_is_within_a_percent_of_the_formula():
    """Bytes a parameter on one of W ranks, float32 and Adam: what the benchmarks count."""
    world = dist.get_world_size()
    formula = {"zero1": (4, 4 / world, 8 / world), "fsdp": (4 / world, 4 / world, 8 / world)}
    shape = at_context(size("tiny"), 8)
    model = TransformerLM(shape)
    total = count_parameters(model)
    gains = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    for engine, bytes_each in formula.items():
        setting = Setting(shape, engine, batch_size=1, precision="fp32", warmup=1, steps=1, trace=False)
        found = measure_step(setting, torch.device("cpu"))
        for what, each, alone in zip(("parameters", "gradients", "state"), bytes_each, (4, 4, 8), strict=True):
            # The norms, which fsdp replicates, weigh more in a smaller share of so small a model.
            expected = each * total + (alone - each) * (gains if engine == "fsdp" else 0)
            assert found[f"memory.{what}"] == pytest.approx(expected, rel=0.01), (engine, what)


def run_checks(names: list[str]) -> dict[str, str]:
    """Check → "" where it holds, else the trace, on this rank."""
    results = {}
    for name in names:
        try:
            CHECKS[name]()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    return results
