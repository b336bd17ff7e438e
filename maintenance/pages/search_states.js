// Lunr makes one of two states of its index whose texts are equal. It joins a state's text without separators, so that
// the edges "1" to state 2 and "3" to state 45 read like the edge "1" to state 2345, and words with digits are lost.
lunr.TokenSet.prototype.toString = function () {
  const edges = Object.keys(this.edges).sort();
  return this._str || (this.final ? "1" : "0") + edges.map((letter) => letter + this.edges[letter].id).join();
};
