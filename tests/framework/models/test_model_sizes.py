"""Models at other sizes than they were built for: the same parameters, timm's own numbers, and clear errors."""

import copy
import importlib

import pytest
import timm
import torch
from lightning.pytorch import LightningModule
from timm.layers.pos_embed_rel import RelPosBias
from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.models.model_sizes import accept_any_size, check_sizes, find_objection, size_multiple
from dlo_tasks.imagenet.timm_sizes import bias_at
from support.distributions import install

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}
AVERAGED = {**TINY, "class_token": False, "global_pool": "avg"}
COAT = {"img_size": 64, "num_classes": 4, "embed_dim": (32, 32, 64, 64), "depths": (1, 1, 2, 2), "stem_width": (8, 16)}

MODELS = {
    "vit": ("vit_tiny_patch16_224", TINY),
    "vit, no class token": ("vit_tiny_patch16_224", AVERAGED),
    "deit": ("deit_tiny_distilled_patch16_224", TINY),
    "vit, registers": ("vit_small_patch16_224", {**TINY, "reg_tokens": 2}),
    "coatnet": ("coatnet_0_rw_224", COAT),
    "coatnet, nano": ("coatnet_nano_rw_224", {**COAT, "img_size": (64, 96)}),
    "coatnet, mlp": ("coatnet_rmlp_nano_rw_224", COAT),
}
ATTENTIVE = [name for name in MODELS if "coat" in name]


def build(name: str, **more) -> nn.Module:
    torch.manual_seed(0)
    architecture, arguments = (MODELS | FAMILIES)[name]
    model = timm.create_model(architecture, **{**arguments, **more})
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # Tables begin as zeros, or so small that none would show.
            parameter.add_(torch.randn(parameter.shape), alpha=1 if "bias_table" in key else 0.1)
    return model.eval()


def images(*sides: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 3, *sides, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [name for name in MODELS if "coat" not in name])
def test_a_vit_is_timms_own_dynamic_one(name):
    model, dynamic = build(name), build(name, dynamic_img_size=True)
    dynamic.load_state_dict(model.state_dict())
    accept_any_size(model)
    for sides in ((16, 16), (64, 48), (32, 32)):
        torch.testing.assert_close(model(images(*sides)), dynamic(images(*sides)), rtol=0, atol=0)


@pytest.mark.parametrize(("height", "width"), [(4, 4), (11, 11), (5, 9)])
def test_a_bias_depends_on_the_offset_relative_to_the_image(height, width):
    """A table that is linear in the offset stays so, steeper for fewer cells; rows and columns do not mix."""
    rel_pos = RelPosBias((7, 7), 2)
    offset = torch.arange(-6.0, 7.0)
    with torch.no_grad():
        table = torch.stack([offset[:, None].expand(13, 13), offset[None].expand(13, 13)], dim=-1)
        rel_pos.relative_position_bias_table.copy_(table.reshape(-1, 2))
    bias = bias_at(rel_pos, height, width).view(2, height, width, height, width)
    for head, side in enumerate((height, width)):
        scale = 13 / (2 * side - 1)
        for first, second in ((1, 1), (2, 1), (1, 3)):
            place = (first, 0, second, 0) if head == 0 else (0, first, 0, second)
            assert bias[head][place].item() == pytest.approx(scale * (first - second), abs=1e-5)


@pytest.mark.parametrize(
    "name",
    ["vit, no class token", *(pytest.param(name, marks=pytest.mark.slow) for name in ("coatnet", "coatnet, mlp"))],
)
def test_it_compiles_to_one_graph_a_size(name):
    model = build(name, **({"depths": (1, 1, 1, 1)} if name in ATTENTIVE else {}))
    accept_any_size(model)
    graphs = []
    torch._dynamo.reset()

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    for sides in ((64, 64), (96, 96), (64, 64), (96, 96)):
        torch.testing.assert_close(compiled(images(*sides)), model(images(*sides)))
    assert len(graphs) == 2
    torch._dynamo.reset()


def test_it_trains_in_bfloat16_and_channels_last_after_evaluating_in_inference_mode():
    model = build("coatnet")
    accept_any_size(model)
    model.to(memory_format=torch.channels_last)
    given = images(96, 96).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        model(given)
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(given).float().square().mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(value.grad).all() for value in model.parameters())


def test_what_a_size_is_a_multiple_of():
    assert size_multiple(build("vit")) == 8
    assert size_multiple(build("coatnet")) == 32
    assert size_multiple(timm.create_model("vit_tiny_r_s16_p8_224", img_size=64)) == 32
    assert size_multiple(timm.create_model("resnet18")) is None
    assert size_multiple(timm.create_model("cait_xxs24_224", patch_size=14, img_size=56, depth=1)) == 14
    few = {"patch_size": 14, "img_size": 56, "embed_dim": 32, "depth": 1, "num_heads": 2}
    seen = timm.create_model("deepseek_vit_412m", **few)
    assert size_multiple(seen) == 14
    with pytest.raises(DloError, match="multiples of 14 pixels, got 64; use 56 or 70"):
        check_sizes(seen, [(64, 64)], (56, 56))
    assert size_multiple(timm.create_model("deepseek_vit_412m", **few, dynamic_img_pad=True)) is None
    assert size_multiple(nn.ModuleList([build("vit"), build("coatnet")])) == 32


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_cr_tiny_224"])
def test_swin_transformers_keep_their_windows_at_other_sizes(name):
    """Equal to timm's own model that is built for any size, and at the size of construction to the plain model."""
    torch.manual_seed(0)
    sizes = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "num_classes": 3}
    plain = timm.create_model(name, **sizes).eval()
    free = timm.create_model(name, **sizes, strict_img_size=False).eval()
    free.load_state_dict(plain.state_dict())
    before, keys = plain(images(32, 32)), list(plain.state_dict())
    assert find_objection(plain, (48, 64)) is not None
    accept_any_size(plain)
    accept_any_size(plain)
    assert torch.equal(plain(images(32, 32)), before)
    assert list(plain.state_dict()) == keys
    for size in ((48, 64), (20, 24)):
        check_sizes(plain, [size], (32, 32))
        torch.testing.assert_close(plain(images(*size)), free(images(*size)))
    with pytest.raises(DloError, match="multiples of 4 pixels, got 34; use 32 or 36"):
        check_sizes(plain, [(32, 34)], (32, 32))


SMALL = {"img_size": 32, "num_classes": 3}
LARGE = {"img_size": 64, "num_classes": 3}
VIT = {**SMALL, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
SHARED = {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}
#: Models of families that have tensors for one size.
FAMILIES = {
    "beit": ("beit_base_patch16_224", {**VIT, "use_abs_pos_emb": True}),
    "beit, shared": ("beit_base_patch16_224", {**VIT, **SHARED}),
    "relative bias": ("vit_srelpos_small_patch16_224", {**VIT, "rel_pos_type": "bias", "class_token": True}),
    "relative mlp": ("vit_relpos_small_patch16_224", {**VIT, "shared_rel_pos": True}),
    "eva": ("eva02_tiny_patch14_224", VIT),
    "rope mixed": ("vit_small_patch16_rope_mixed_ape_224", VIT),
    "dinov3": ("vit_small_patch16_dinov3", VIT),
    "cait": ("cait_xxs24_224", VIT),
    "convit": ("convit_tiny", {**VIT, "embed_dim": 8, "num_heads": 4, "local_up_to_layer": 1}),
    "pit": ("pit_xs_224", {**SMALL, "base_dims": (8, 8, 8), "heads": (2, 2, 2), "depth": (1, 1, 1)}),
    "hiera": ("hiera_tiny_224", {**LARGE, "embed_dim": 16, "stages": (1, 1, 1, 1)}),
    "maxvit": ("maxvit_tiny_tf_224", {**COAT, "num_classes": 3, "depths": (1, 1, 1, 1)}),
    "maxvit, mlp": ("maxvit_rmlp_pico_rw_256", {**COAT, "num_classes": 3, "depths": (1, 1, 1, 1)}),
    "volo": ("volo_d1_224", SMALL),
    "gcvit": ("gcvit_xxtiny", LARGE),
    "mvitv2": ("mvitv2_tiny", LARGE),
}
#: Whose tables timm resizes by the same interpolation.
AS_TIMM = ("beit", "beit, shared", "relative bias", "relative mlp", "eva", "rope mixed", "dinov3")
SLOW = ("maxvit", "maxvit, mlp", "volo", "gcvit", "mvitv2", *AS_TIMM[1:])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS | FAMILIES]
)
def test_models_train_the_same_parameters_at_other_sizes(name):
    model, size = build(name), (MODELS | FAMILIES)[name][1]["img_size"]
    height, width = size if isinstance(size, tuple) else (size, size)
    own, state = dict(model.named_parameters()), {key: value.shape for key, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(images(height, width))
    accept_any_size(model)
    accept_any_size(model)
    step = size_multiple(model) or 16
    for sides in ((height + step, width + 2 * step), (2 * height, 2 * width), (max(step, 16),) * 2):
        check_sizes(model, [sides], (height, width))
        model.zero_grad()
        out = model(images(*sides))  # Without dropout, and with the statistics of batch norms.
        assert out.shape == before.shape
        out.square().sum().backward()
        for key, value in model.named_parameters():
            assert value.grad is not None, key
            assert value.grad.isfinite().all(), key
            # Each position's; a map of a single cell has the middle of a table alone.
            if name in MODELS and key.endswith(("pos_embed", "bias_table")) and sides[0] > step:
                used = value.grad.flatten(0, -2).abs().sum(1) > 0
                assert used.float().mean() > 0.9, (key, sides)
    with torch.no_grad():
        assert torch.equal(model(images(height, width)), before)  # Nothing of another size is left.
    assert {key: value.shape for key, value in model.state_dict().items()} == state
    assert all(own[key] is value for key, value in model.named_parameters())


@pytest.mark.parametrize("name", [*ATTENTIVE, *AS_TIMM])
def test_models_are_timms_own_of_the_other_size(name):
    """By timm's ``set_input_size``, which makes other parameters; CoAtNet's tables it interpolates otherwise."""
    model, sizes = build(name), ((128, 128), (32, 64)) if name in MODELS else ((48, 64), (24, 16))
    with torch.no_grad():
        for part in model.modules() if name in MODELS else ():
            if isinstance(part, RelPosBias):  # Flat ones are alike.
                part.relative_position_bias_table[:] = torch.randn(part.relative_position_bias_table.shape[1])
    for sides in sizes:
        other, ours = copy.deepcopy(model), copy.deepcopy(model)
        other.set_input_size(img_size=sides)
        accept_any_size(ours)
        with torch.no_grad():
            torch.testing.assert_close(ours(images(*sides)), other(images(*sides)), rtol=1e-4, atol=1e-4)


def test_recomputed_blocks_see_the_map_of_their_forward():
    """Two sizes before a backward, whose blocks run again in it."""
    grads = []
    for recomputes in (False, True):
        model = build("beit")
        accept_any_size(model)
        model.set_grad_checkpointing(recomputes)
        model.train()
        (model(images(48, 48)).sum() + model(images(64, 32)).sum()).backward()
        grads.append(model.blocks[0].attn.relative_position_bias_table.grad)
    torch.testing.assert_close(grads[1], grads[0])


class Holder(LightningModule):
    """A LightningModule whose forward is not that of its network."""

    def __init__(self, network: nn.Module, attribute: str = "model") -> None:
        super().__init__()
        setattr(self, attribute, network)


class Runner(Holder):
    def forward(self, images):
        return self.network(images)


def mixer() -> nn.Module:
    return timm.create_model("mixer_s16_224", img_size=32)


@pytest.mark.parametrize(
    ("make", "sizes", "message"),
    [
        (mixer, [(64, 64)], r"mixer_s16_224: images must have .* 32 x 32 pixels, got 64 x 64 \(.*\); use a ViT"),
        (lambda: Holder(mixer()), [(64, 64)], "mixer_s16_224: images must have"),
        (lambda: timm.create_model("levit_128s", img_size=32), [(64, 64)], "levit_128s: images must have"),
        (lambda: timm.create_model("nest_tiny", img_size=32), [(64, 64)], "nest_tiny: images must have"),
        (lambda: Runner(mixer(), "network"), [(64, 64)], "Runner: images must have"),
        (lambda: build("vit"), [(32, 32), (32, 36)], "multiples of 8 pixels, got 36; use 32 or 40"),
        (lambda: Holder(build("coatnet"), "network"), [(16, 16)], "multiples of 32 pixels, got 16; use 32$"),
    ],
)
def test_what_a_model_cannot_take_is_refused(make, sizes, message):
    module = make()
    accept_any_size(module)
    with pytest.raises(DloError, match=message):
        check_sizes(module, sizes, (32, 32))


class Skips(nn.Module):
    """Skips a layer at random, with Python's generator as some models do."""

    def forward(self, images):
        return images if self.training and float(torch.rand(())) < 0.5 else 2 * images


def test_a_check_changes_nothing_and_draws_no_random_number():
    model = timm.create_model("resnet18", drop_rate=0.5, drop_path_rate=0.5)
    model.layer2 = nn.Sequential(Skips(), model.layer2)
    model.train()
    model.layer1.eval()
    modes = [part.training for part in model.modules()]
    before, random = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
    check_sizes(model, [(32, 32), (64, 48)], (48, 48))
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_model_that_cannot_run_without_data_is_let_through():
    seen = []

    class Judge(nn.Module):
        def forward(self, images):
            seen.append(images.device.type)
            if float(images.mean()) > 0 or images.shape[2] > 4:
                raise RuntimeError("not in training either")

    check_sizes(Judge(), [(8, 8)], (4, 4))
    assert seen == ["meta"]
    check_sizes(Holder(nn.Linear(2, 2), "network"), [(8, 8)], (4, 4))


def test_a_check_leaves_a_module_with_two_names_its_tensors():
    shared = nn.Conv2d(3, 3, 1)
    model = nn.Module()
    model.one, model.other = shared, shared
    model.forward = lambda images: model.other(model.one(images))  # type: ignore[method-assign]
    check_sizes(model, [(8, 8)], (4, 4))
    assert not shared.weight.is_meta
    assert model(torch.zeros(1, 3, 4, 4)).shape == (1, 3, 4, 4)


class Frequencies(nn.Module):
    """As CSATv2: its first convolution is given other channels than images have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(12, 4, 3)

    def forward(self, images):
        return self.conv(nn.functional.pixel_unshuffle(images, 2)).mean((2, 3))


def test_images_have_three_channels_where_the_first_convolution_has_others():
    check_sizes(Frequencies(), [(16, 16)], (32, 32))
    with pytest.raises(DloError, match=r"got 4 x 4 .*([Kk]ernel size|too small)"):
        check_sizes(Frequencies(), [(4, 4)], (32, 32))


LIBRARY = """
from dlo_framework.models.model_sizes import ImageModels
from torch import nn


class Net(nn.Module):
    free = False

    def forward(self, images):
        if not self.free and images.shape[-1] != 16:
            raise ValueError("built for 16")
        return images.mean((1, 2, 3))


class Sizes(ImageModels):
    def accept_any_size(self, part):
        part.free = True

    def size_multiples(self, part):
        return [6]


class NoSizes:
    pass
"""


def test_a_users_library_says_how_its_models_take_other_sizes(tmp_path, monkeypatch):
    points = ["ms_library = ms_library:Sizes", "ms_wrong = ms_library:NoSizes", "ms_gone = ms_gone:Sizes"]
    install(tmp_path, "ms_pack", {"dlo_framework.image_models": points}, "1.0", ms_library=LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    base = importlib.import_module("ms_library").Net
    for cls in (base, type("Derived", (base,), {"__module__": "elsewhere"})):
        model = Holder(cls(), "model")
        with pytest.raises(DloError, match="multiples of 6 pixels, got 16"):
            check_sizes(model, [(16, 16)], (16, 16))
        with pytest.raises(DloError, match="built for 16"):
            check_sizes(model, [(24, 24)], (16, 16))
        accept_any_size(model)
        check_sizes(model, [(24, 24)], (16, 16))
    with pytest.raises(DloError, match=r"image models of 'ms_wrong' \(ms_pack 1.0\) must be a subclass of "):
        accept_any_size(type("Wrong", (base,), {"__module__": "ms_wrong.nets"})())
    with pytest.raises(DloError, match=r"image models of 'ms_gone' \(ms_pack 1.0\) failed to import: ModuleNotFound"):
        size_multiple(type("Gone", (base,), {"__module__": "ms_gone"})())
