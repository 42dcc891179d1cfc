# fish: slimectl completion fish | source
function __slimectl_complete
    set -lx _SLIMECTL_COMPLETE fish
    set -lx _SLIMECTL_LINE (commandline -cp)
    set -l candidates (slimectl 2>/dev/null)
    if test (count $candidates) -gt 0
        printf '%s\n' $candidates
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command slimectl --no-files --arguments "(__slimectl_complete)"
