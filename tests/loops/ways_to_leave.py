"""Ways to leave a loop, each by break or return, or by an exception. It needs nothing but Python and `_frames.py`.

`python -m tests.measure.pythons` runs it on other Pythons, whose instructions are others.
"""

from __future__ import annotations

import sys


class Context:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


class Swallows(Context):
    def __exit__(self, *_):
        return True


class Raises(Context):
    def __exit__(self, *_):
        raise ValueError


class Odd:
    """Like a tensor of several elements, it is neither true nor false."""

    __slots__ = ()

    def __bool__(self):
        raise ValueError

    __eq__ = __lt__ = __bool__
    __hash__ = None


def drawn(items):
    """Draws like tqdm."""
    for item in items:
        yield item


def drawn_carefully(items):
    try:
        for item in items:
            yield item
    finally:
        pass


# -- on purpose ---------------------------------------------------------------------------------------------------------


def by_break(items):
    for item in items:
        if item == 1:
            break


def by_break_with_else(items):
    for item in items:
        if item == 1:
            break
    else:
        return
    len([1])


def by_return(items):
    for item in items:
        if item == 1:
            return


def by_return_of_a_call(items):
    for item in items:
        if item == 1:
            return len([item])


def by_return_of_the_item(items):
    for item in items:
        if item == 1:
            return item


def by_break_inside_finally(items):
    try:
        for item in items:
            if item == 1:
                break
    finally:
        pass


def by_break_from_try(items):
    for item in items:
        try:
            if item == 1:
                break
        finally:
            len([1])


def by_break_from_with(items):
    for item in items:
        with Context():
            if item == 1:
                break


def by_return_from_with(items):
    for item in items:
        with Context():
            if item == 1:
                return 3


def by_break_inside_with(items):
    with Context():
        for item in items:
            if item == 1:
                break


def by_break_after_what_was_caught(items):
    for _ in items:
        try:
            int("a")
        except ValueError:
            break


def by_return_after_what_was_caught(items):
    for _ in items:
        try:
            int("a")
        except ValueError as error:
            return error


def by_break_through_a_generator(items):
    for item in drawn(items):
        if item == 1:
            break


def by_break_through_two(items):
    for item in drawn_carefully(drawn(items)):
        if item == 1:
            break


def by_break_through_enumerate(items):
    for _, item in enumerate(items):
        if item == 1:
            break


def by_the_end_of_what_it_is_zipped_with(items):
    for _, _ in zip(range(2), items):
        pass


def by_the_end_of_what_comes_after_it(items):
    for _, _ in zip(items, range(2)):
        pass


def by_break_of_the_inner_loop(items):
    for _ in range(1):
        for item in items:
            if item == 1:
                break


def by_return_from_the_inner_loop(items):
    for _ in range(2):
        for item in items:
            if item == 1:
                return


def by_break_where_it_has_a_name(items):
    named = iter(items)
    for item in named:
        if item == 1:
            break


def by_del(items):
    named = iter(items)
    next(named), next(named)
    del named


def by_another_value(items):
    named = iter(items)
    next(named), next(named)
    named = None
    return named


def by_the_end_of_the_function(items):
    named = iter(items)
    next(named), next(named)


def by_break_out_of_while(items):
    named = iter(items)
    while True:
        if next(named) == 1:
            break


# -- by an exception ----------------------------------------------------------------------------------------------------


def error_raised(items):
    for item in items:
        if item == 1:
            raise ValueError


def error_in_a_call(items):
    for item in items:
        if item == 1:
            int("a")


def error_through_a_generator(items):
    for item in drawn(items):
        if item == 1:
            raise ValueError


def error_through_two(items):
    for item in drawn_carefully(drawn(items)):
        if item == 1:
            raise ValueError


def error_through_enumerate(items):
    for _, item in enumerate(items):
        if item == 1:
            raise ValueError


def error_inside_with(items):
    with Context():
        for item in items:
            if item == 1:
                raise ValueError


def error_that_is_swallowed(items):
    with Swallows():
        for item in items:
            if item == 1:
                raise ValueError


def error_from_with(items):
    for _ in items:
        with Context():
            int("a")


def error_at_the_end_of_with(items):
    for _ in items:
        with Raises():
            pass


def error_past_finally(items):
    for _ in items:
        try:
            int("a")
        finally:
            len([1])


def error_past_except(items):
    for _ in items:
        try:
            int("a")
        except KeyError:
            pass


def error_raised_again(items):
    for _ in items:
        try:
            int("a")
        except ValueError:
            raise


def error_of_an_assertion(items):
    for item in items:
        assert item != 1


def error_of_an_attribute(items):
    for item in items:
        if item == 1:
            item.missing


def error_of_an_item(items):
    for item in items:
        if item == 1:
            {}[item]


def error_of_a_name(items):
    for item in items:
        if item == 1:
            missing


def error_of_a_comparison(items):
    for _ in items:
        if Odd() < 3:
            break


def error_of_a_condition(items):
    odd = Odd()
    for _ in items:
        if odd:
            break


def error_of_a_condition_negated(items):
    odd = Odd()
    for _ in items:
        if not odd:
            break


def error_of_while(items):
    odd = Odd()
    for _ in items:
        while odd:
            pass


def error_of_unpacking(items):
    for item in items:
        if item == 1:
            _, _ = (1,)


def error_of_setting_an_attribute(items):
    odd = Odd()
    for item in items:
        if item == 1:
            odd.missing = 1


def error_of_setting_an_item(items):
    history = []
    for item in items:
        if item == 1:
            history[item] = 1


def error_of_deleting_an_item(items):
    cache = {}
    for item in items:
        if item == 1:
            del cache[item]


def error_of_deleting_an_attribute(items):
    odd = Odd()
    for item in items:
        if item == 1:
            del odd.missing


def error_of_an_import(items):
    for item in items:
        if item == 1:
            import no_such_module


WAYS = [way for name, way in list(globals().items()) if name.startswith(("by_", "error_"))]


def is_taken_for_purpose(way, is_left_on_purpose, drawn_by):
    """What `is_left_on_purpose` says of a loop that is left in this way."""
    said = []

    def items():
        loop = ()
        try:
            for item in range(5):
                loop = drawn_by(sys._getframe(0).f_back)
                yield item
        except GeneratorExit:
            said.append(is_left_on_purpose(sys._getframe(0).f_back, loop))
            raise

    class Items:
        def __iter__(self):
            return items()

    try:
        way(Items())
    except Exception as error:
        assert way.__name__.startswith("error_"), (way.__name__, error)
    [one] = said
    return one


def wrong(is_left_on_purpose, drawn_by):
    """The ways that it takes for others, with and without a debugger's trace."""
    found = []
    for trace in (None, lambda *_: None):
        sys.settrace(trace)
        try:
            came = [is_taken_for_purpose(way, is_left_on_purpose, drawn_by) for way in WAYS]
        finally:
            sys.settrace(None)
        found += [way.__name__ for way, on_purpose in zip(WAYS, came) if on_purpose != way.__name__.startswith("by_")]
    return found
