// Unpacks what the file carries and draws it; the tables stand without any of this.

async function inflate(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function main() {
  const data = JSON.parse(document.getElementById("data").textContent);
  unpackMaps(await inflate("maps"), data.arms);
  drawPoolMaps(data);
  const script = document.createElement("script");
  script.textContent = new TextDecoder().decode(await inflate("plotly"));
  document.head.append(script);
  drawCharts(window.Plotly, data);
  document.body.dataset.ready = "yes";
}

main().catch((error) => {
  const note = Object.assign(document.createElement("p"), { className: "warnings" });
  note.textContent = `Charts and pool maps could not be drawn (a browser of 2023 or later is needed): ${error.message}`;
  document.querySelector("header").append(note);
});
