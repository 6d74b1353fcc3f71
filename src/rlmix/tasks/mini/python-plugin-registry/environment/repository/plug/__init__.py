from plug import builtin
from plug.registry import register


def load():
    for name, plugin in builtin.PLUGINS.items():
        register(name, plugin)
