import importlib
import inspect
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from dlo_tasks.imagenet.classifier import ImageClassifier

pytestmark = pytest.mark.recipes

FOLDER = Path(__file__).parents[3] / "configs" / "imagenet"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
DIGITS = [FOLDER.parent / "quickstart.yaml", *sorted((FOLDER.parent / "digits").glob("*.yaml"))]
DATA = {"ImageFolderData": "dlo_tasks.imagenet.folder", "DigitsData": "dlo_tasks.imagenet.digits"}


class Thousand:
    """Stands in for ImageNet, which has to be there for a datamodule."""

    num_classes = 1000

    def __init__(self, image_size: int, eval_image_size: int | None = None) -> None:
        self.image_size, self.eval_image_size = image_size, eval_image_size


def accepted(cls: type) -> set[str]:
    """The arguments of a class, with those of its parents where it takes `**kwargs`."""
    names: set[str] = set()
    for parent in cls.__mro__:
        if "__init__" in vars(parent):
            parameters = inspect.signature(parent.__init__).parameters.values()
            names |= {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return names - {"self"}


#: Models that have been built: many recipes differ in the trainer alone.
BUILT: list[object] = []


@pytest.mark.parametrize("path", [*CONFIGS, *DIGITS], ids=lambda path: path.stem)
def test_a_recipe_is_accepted_by_its_classes_and_builds(path):
    config = yaml.safe_load(path.read_text())
    assert set(config) <= {"seed_everything", "trainer", "model", "data", "callbacks", "plugins"}
    assert set(config["trainer"]) <= accepted(Trainer)
    assert config["model"]["class_path"] == "ImageClassifier"
    if config["model"]["init_args"].get("optimizer") == "OneBitAdam":
        importlib.import_module("dlo_plugins.compression.one_bit")  # As the run's callback does.
    task = ImageClassifier(**config["model"]["init_args"])
    data = config["data"]
    cls = getattr(importlib.import_module(DATA[data["class_path"]]), data["class_path"])
    given = data["init_args"]
    module = cls(**given)
    classes = module.num_classes if path in DIGITS else 1000
    task.check(module if path in DIGITS else Thousand(given["image_size"], given.get("eval_image_size")))
    size, names = data["init_args"]["image_size"], ("model", "model_args", "position_embedding", "experts")
    model = [size, *(config["model"]["init_args"].get(name) for name in names)]
    if model in BUILT:
        return
    BUILT.append(model)
    with torch.device("meta"):
        task.configure_model()
        (images,), _ = task.inputs((torch.zeros(2, 3, size, size), None))
        assert task(images).shape == (2, classes)
    task.parallel_plan().validate(task.model)


def test_deits_student_and_its_teacher_fit_together(monkeypatch):
    """The recipe's Distill accepts both on the meta device; the teacher's weights are not downloaded."""
    from dlo_framework.frozen_model import FrozenModel
    from dlo_plugins.distill.callback import Distill

    config = yaml.safe_load((FOLDER / "deit_distilled.yaml").read_text())
    init = next(c["init_args"] for c in config["trainer"]["callbacks"] if c["class_path"] == "Distill")
    given = init.pop("teacher")["task"]["init_args"]
    assert given.pop("pretrained")
    distill = Distill(FrozenModel(task=ImageClassifier(**given)), **init)
    student = ImageClassifier(**config["model"]["init_args"])
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    distill.check_run(trainer, student, Thousand(config["data"]["init_args"]["image_size"]))
    with torch.device("meta"):
        student.configure_model()
    assert student.use_distillation_token()
    by_class, by_token = student.train()(torch.zeros(2, 3, 224, 224, device="meta"))
    assert by_class.shape == by_token.shape == (2, 1000)
