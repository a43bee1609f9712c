// The page, put together.

function theme() {
  const root = document.documentElement;
  const wants = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const apply = () => {
    const now = chosen || (wants.matches ? "dark" : "light");
    root.dataset.theme = now;
    document.getElementById("theme").textContent = now === "dark" ? "Light" : "Dark";
  };
  wants.addEventListener("change", apply);
  document.getElementById("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    apply();
  });
  apply();
}

function contents(sections) {
  const links = sections.map((one) => make("a", { href: `#${one.id}` }, one.querySelector("h2").textContent));
  document.getElementById("contents").append(...links);
}

theme();
document.getElementById("title").textContent = `Plan: ${plan.title}, ${seconds(plan.seconds)} a step`;
const sections = [section("overview", "Overview", facts(), costs()), layers(), ...layerCosts(), ...timeline(), memory(), ...measured(), rejected(), dearest(), arrays()];
document.getElementById("content").append(...sections);
document.getElementById("footer").textContent = "Made by autopar. Seconds and bytes are predictions of its cost model unless they are called measured.";
contents(sections);
search();
