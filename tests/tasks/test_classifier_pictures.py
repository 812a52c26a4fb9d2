import pytest
import torch

from dlo_tasks.imagenet import classifier_logs


def test_denormalise_undoes_the_normalisation():
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    normal = (pixels / 255 - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    assert torch.equal(classifier_logs.denormalise(normal, mean, std), pixels)
    assert classifier_logs.denormalise(pixels, mean, std) is pixels
    stretched = classifier_logs.denormalise(normal, None, None)
    assert stretched.amin() == 0
    assert stretched.amax() == 255


def test_the_grid_holds_each_image_where_its_label_is():
    images = torch.stack([torch.full((3, 32, 32), shade, dtype=torch.uint8) for shade in (10, 100, 200)])
    grid = classifier_logs.image_grid(images, ["a", "b", "a class with a very long name indeed"], columns=2)
    assert grid.dtype is torch.uint8
    assert grid.shape == (3, 2 * (96 + 50 + 4) + 4, 2 * 100 + 4), "three lines of text"
    assert grid[0, 20, 20] == 10
    assert grid[0, 20, 120] == 100
    assert grid[0, 170, 20] == 200
    captions = grid[:, 101:117, 4:100]
    assert captions.min() < 100  # there is ink under the first image


def test_labels_of_hard_padding_and_soft_targets():
    names = ["cat", "dog", "owl"]
    assert classifier_logs.target_labels(torch.tensor([2, 0, -1]), names) == ["owl", "cat", "(padding)"]
    soft = torch.tensor([[0.25, 0.75, 0.0], [0.0, 1.0, 0.0]])
    assert classifier_logs.target_labels(soft, names) == ["75% dog + 25% cat", "100% dog"]


def test_a_small_confusion_matrix_shows_shares_and_counts():
    counts = torch.diag(torch.full((10,), 50))
    counts[3, 7] = 50
    picture = classifier_logs.confusion_picture(counts, [str(i) for i in range(10)])

    def corner(row, column):
        return picture[:, 46 + row * 44 + 2, 110 + column * 44 + 2].tolist()

    assert corner(0, 0) == [20, 72, 140]  # all right: full blue
    assert corner(0, 1) == [255, 255, 255]
    assert corner(3, 7) == [216, 140, 149]  # half of class 3 taken for 7: half red
    cell = picture[:, 46 + 3 * 44 : 46 + 4 * 44, 110 + 7 * 44 : 110 + 8 * 44]
    assert len(torch.unique(cell.flatten(1), dim=1).T) > 2  # the count is written in it


@pytest.mark.parametrize(("classes", "cell"), [(100, 10), (1000, 1), (1500, 1)])
def test_a_large_confusion_matrix_has_a_cell_of_pixels_for_each_pair(classes, cell):
    counts = torch.eye(classes, dtype=torch.long) * 50
    counts[5, 6] = 1
    picture = classifier_logs.confusion_picture(counts, [f"class {i}" for i in range(classes)])
    assert picture.shape[2] == 24 + classes * cell + 8
    wrong = picture[:, 46 + 5 * cell, 24 + 6 * cell]
    assert wrong[1] < 235  # one in 51 still shows
