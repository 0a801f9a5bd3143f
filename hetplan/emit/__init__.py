"""Plans as files that launchers and engines run; the engines are in `EMITTERS`, the launchers in `LAUNCHERS`."""
