def refuses(problem, arch):
    return "todo"
