"""Names from outside: registered by hand, or offered by an installed package."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest

from gare.errors import ConfigError
from gare.registry import Registry
from strangers import install


def test_an_entry_point_is_found_by_name(tmp_path, monkeypatch):
    install(tmp_path, "stars", "SIDES = 5\n", "[gare.shapes]\nstar = stars:SIDES\n")
    monkeypatch.syspath_prepend(tmp_path)
    shapes = Registry("shape", {"circle": 0})
    assert list(shapes) == ["circle", "star"]
    assert "star" in shapes
    assert shapes["star"] == 5
    assert "stars" in sys.modules


def test_an_entry_point_that_does_not_load_names_its_package(tmp_path, monkeypatch):
    install(tmp_path, "broken", "raise RuntimeError('no GPU')\n", "[gare.shapes]\nhex = broken:SIDES\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"package broken offers the shape 'hex'.*no GPU"):
        Registry("shape", {})["hex"]


def test_a_module_that_registers_more_is_imported_when_names_are_looked_up(tmp_path, monkeypatch):
    shapes = Registry("shape", {"circle": 0}, more="more_shapes")
    monkeypatch.setitem(sys.modules, "the_shapes", shapes)
    (tmp_path / "more_shapes.py").write_text("import the_shapes\nthe_shapes.register('square', 4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "more_shapes" not in sys.modules
    with pytest.raises(ValueError, match="already a shape 'square'"):
        shapes.register("square", 5)
    assert list(shapes) == ["circle", "square"]


def test_another_thread_waits_until_all_of_that_module_has_registered(tmp_path, monkeypatch):
    shapes = Registry("shape", {"circle": 0}, more="slow_shapes")
    begun, may_end = threading.Event(), threading.Event()
    monkeypatch.setitem(
        sys.modules, "the_shapes", SimpleNamespace(shapes=shapes, begun=begun, may_end=may_end)
    )
    (tmp_path / "slow_shapes.py").write_text(
        "from the_shapes import begun, may_end, shapes\n"
        "shapes.register('square', 4)\n"
        "begun.set()\n"
        "may_end.wait()\n"
        "shapes.register('star', 5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(list, shapes)
        begun.wait()
        second = threads.submit(list, shapes)
        wait([second], timeout=0.1)  # it would end at once
        may_end.set()
        assert first.result() == second.result() == ["circle", "square", "star"]


def test_a_name_is_given_once():
    shapes = Registry("shape", {"circle": 0})
    assert shapes.register("circle", 0) == 0
    with pytest.raises(ValueError, match="already a shape 'circle'"):
        shapes.register("circle", 1)


def test_a_miss_lists_what_there_is():
    with pytest.raises(ConfigError, match="no loss term 'x'; there are: kl, radius"):
        Registry("loss term", {"kl": 1, "radius": 2})["x"]
