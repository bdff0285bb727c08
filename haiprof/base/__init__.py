"""What every part uses: errors, units, options, statistics, intervals, files."""
