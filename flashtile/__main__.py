from flashtile.cli import main

main()
