"""Searches of the garbage collector's objects must leave no reference, which would break other threads."""

import gc
import sys

import torch

from mpinspect.runtime.garbage_collection import living, without_collection


class Proxy:
    """A lazy object: reading any attribute would load a module."""

    def __getattribute__(self, name):
        raise AssertionError(f"{name} was read")


def test_living_finds_the_objects_of_the_wanted_types():
    proxy, modules = Proxy(), [torch.nn.Linear(1, 1) for _ in range(3)]
    found = living([torch.nn.Linear])
    assert {id(module) for module in modules} <= {id(each) for each in found}
    assert all(type(each) is torch.nn.Linear for each in found)
    parameters = living([torch.nn.Parameter])
    assert any(each is modules[0].weight for each in parameters)
    del proxy


def test_living_refers_to_no_other_object_when_it_returns():
    """``tuple(generator)`` in another thread fails as long as another reference to the tuple exists."""
    others = [[number] for number in range(1000)] + [torch.ones(1) for _ in range(1000)]
    with without_collection():
        before = [sys.getrefcount(each) for each in others]
        found = living([torch.nn.Linear])
        assert [sys.getrefcount(each) for each in others] == before
    assert isinstance(found, list)


def test_garbage_collection_is_restored_afterwards():
    assert gc.isenabled()
    living([])
    assert gc.isenabled()
    gc.disable()
    try:
        living([])
        assert not gc.isenabled()
    finally:
        gc.enable()
