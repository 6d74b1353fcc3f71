PLUGINS = {'Upper': str.upper, 'Lower': str.lower}
