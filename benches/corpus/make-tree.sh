# make-tree.sh WORK TREE : makes WORK/trees/TREE once. The tree appears under its name when it is whole.
set -euo pipefail
WORK=$1
TREE=$2
here=$(dirname "$(realpath "$0")")
OUT="$WORK/trees/$TREE.new"
rm -rf "$OUT"
mkdir -p "$OUT"
. "$here/lib.sh"
case "$TREE" in
base-*) rmdir "$OUT"; . "$here/bases.sh" ;;
workspace-*) . "$here/workspaces.sh" ;;
toolkit-*) . "$here/toolkits.sh" ;;
image-*) . "$here/images.sh" ;;
*) echo "make-tree.sh: unknown tree $TREE" >&2; exit 2 ;;
esac
rm -f "$OUT.log"
rm -rf "$WORK/trees/$TREE"
mv "$OUT" "$WORK/trees/$TREE"
