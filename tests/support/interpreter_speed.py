"""Triton's interpreter without the work that it repeats at each call of a device function."""


def patch_language_once():
    """Let a launch replace only once what the language has by what interprets it.

    The interpreter looks through the whole language at each call of a device function, where all
    was replaced by the launch or by an earlier call: that is half of the time that a step takes.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set()

    def patch_once(function):
        if tl.core.is_builtin(tl.load):  # a launch begins, and the last one has put all back
            done.clear()
        module = id(function.__globals__)
        if module in done:
            return None
        done.add(module)
        return patch(function)

    interpreter._patch_lang = patch_once
